#pragma once
#include "tessera/base/config.hpp"
#include "tessera/base/log.hpp"
#include "tessera/data/dataset.hpp"

namespace tessera {

/// `config` with the tokenizer that its data name, where it names none but bytes. Errors: ConfigError when
/// the data were made with another one, or with one that is larger than the model's vocabulary.
Config with_tokenizer_of_data(Config config, const Logger& log);

/// The samples of a training run. Errors: ConfigError, DataError.
GptData open_run_data(const Config& config);

/// Before the first step: refuses data with ids beyond the model's vocabulary, wherever they lie, and says
/// which data the run reads more than twice. Errors: ConfigError, DataError.
void check_run_data(const Config& config, const Logger& log);

}  // namespace tessera
