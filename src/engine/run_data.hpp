#pragma once
#include "tessera/base/config.hpp"
#include "tessera/base/log.hpp"
#include "tessera/data/dataset.hpp"

namespace tessera {

/// The samples of a training run. Errors: ConfigError, DataError.
GptData open_run_data(const Config& config);

/// Before the first step: refuses data with ids beyond the model's vocabulary, wherever they lie, and says
/// which data the run reads more than twice. Errors: ConfigError, DataError.
void check_run_data(const Config& config, const Logger& log);

}  // namespace tessera
