#pragma once
#include <functional>

#include "tessera/base/families.hpp"
#include "tessera/base/log.hpp"
#include "tessera/data/dataset.hpp"
#include "tessera/data/masking.hpp"
#include "tessera/engine/state.hpp"

namespace tessera {

struct Config;

/// The data that `config` names in files, data.args_path and data.per_split_args_path, put into data.path and
/// data.train_path, valid_path, test_path. Errors: ConfigError for a file that cannot be read or does not
/// hold such lists.
void read_data_lists(Config& config);

/// A dataset that a run reads.
struct NamedDataset {
  double weight = 1;  ///< or kWeightBySize
  std::string prefix;
  std::string split;  ///< what it is cut by: data.split, or all of it for one of the three
};
/// All of them, whichever keys name them.
std::vector<NamedDataset> datasets_of(const Config& config);

/// What samples of a run are made of.
ModelSpec::Samples samples_of(const Config& config);

/// What a run knows of its tokenizer: read once, at its start.
struct RunTokenizer {
  /// data.tokenizer: what the configuration names, as an absolute path; where that is bytes only by default,
  /// what the data were made with.
  std::string name = "bytes";
  /// That of the data's record, else of what data.tokenizer names; none where nothing says, as with data of
  /// Megatron's tools and bytes by default.
  std::optional<TokenizerRecord> record = {};
  /// Of families whose samples are sentences: what they are put together with, and how many ids there are.
  SpecialTokens special = {};
  std::int64_t ids = 0;
};

/// Errors: ConfigError when the data were made with another tokenizer than data.tokenizer, or with one that
/// is larger than the model's vocabulary, or the end of a document or a special token is needed and there is
/// none.
RunTokenizer tokenizer_of_run(const Config& config, const Logger& log);

/// The samples of a training run. `on_progress` is called now and then while indices are built or read.
/// Errors: ConfigError, DataError.
DatasetSplits open_run_data(const Config& config, const RunTokenizer& tokenizer,
                            const std::function<void()>& on_progress);

/// Before the first step: refuses data with ids beyond the model's vocabulary, wherever they lie, and says
/// which data the run reads more than twice. Data of unknown origin that hold nothing but bytes and 256 are
/// those of the byte tokenizer, which is then put into tokenizer.record; other ids are told of, or refused
/// where the end of a document counts. `on_progress` is called after each piece of data.
/// Errors: ConfigError, DataError.
void check_run_data(const Config& config, RunTokenizer& tokenizer, const Logger& log,
                    const std::function<void()>& on_progress);

/// Before training starts from the weights in model.init_from: holds the tokenizer in their folder against
/// the data's, and without one the sizes of the vocabularies. With model.reinitialize another tokenizer is
/// warned of. Errors: ConfigError naming both.
void check_weights_tokenizer(const Config& config, const TokenizerRecord& data, const Logger& log);

/// Refuses to go on from `saved` with data that another tokenizer made. Errors: ConfigError naming `from`.
void check_same_tokenizer(const RunState& saved, const Config& config, const RunTokenizer& tokenizer,
                          const std::filesystem::path& from);

}  // namespace tessera
