#pragma once
/// The nine sections of a training configuration, one plain struct each: what a floor needs it takes as its
/// own struct. The YAML keys are the member names. Reading, checking and printing them: config_file.hpp. A
/// header that needs one section includes its file, not this one: so a new key compiles little anew.

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/config_model.hpp"
#include "tessera/base/config_optimizer.hpp"
#include "tessera/base/config_words.hpp"

namespace tessera {

/// parallel: the layout, how the work is divided among processes.
struct ParallelConfig {
  std::int64_t tensor = 1;
  bool sequence = false;
  std::int64_t tensor_chunks = 0;  ///< as TensorParallel::chunks; on the CPU 0 is 1
  std::int64_t pipeline = 1;
  std::int64_t virtual_stages = 1;
  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
  std::optional<std::string> pipeline_layout = std::nullopt;
  std::optional<std::int64_t> pipeline_split_rank = std::nullopt;  ///< the first stage of the decoder
  std::int64_t context = 1;
  ContextMethod context_method = ContextMethod::automatic;
  std::int64_t expert = 1;
  std::optional<std::int64_t> data = std::nullopt;
  std::int64_t zero_stage = 1;
  std::optional<std::int64_t> zero_group = std::nullopt;  ///< data ranks that share out together; null = all
  ZeroReshard zero_reshard = ZeroReshard::automatic;      ///< stage 3: when gathered weights are freed
  Precision gradient_dtype = Precision::fp32;             ///< in which gradients travel among data ranks
  double timeout_s = 600;

  friend bool operator==(const ParallelConfig&, const ParallelConfig&) = default;
};

struct TrainingConfig {
  std::int64_t steps = 1000;
  std::int64_t seq_length = 1024;  ///< of a model with encoder and decoder the encoder's
  std::optional<std::int64_t> decoder_seq_length = std::nullopt;  ///< null = seq_length
  std::int64_t micro_batch_size = 4;
  std::int64_t global_batch_size = 32;
  Precision precision = Precision::fp32;
  bool fp32_residual = true;  ///< bf16, fp16: keep the residual stream in fp32
  /// fp16: factor on the loss that never changes; null = it follows the gradients, by the four values below.
  std::optional<double> loss_scale = std::nullopt;
  double initial_loss_scale = 4294967296.0;  ///< 2^32
  double min_loss_scale = 1.0;
  std::int64_t loss_scale_window = 1000;  ///< finite steps before the scale doubles
  std::int64_t hysteresis = 2;            ///< non-finite steps from which on the scale is halved
  Recompute recompute = Recompute::none;  ///< automatic: settle_recompute (engine) finds the other three
  RecomputeMethod recompute_method =
      RecomputeMethod::uniform;       ///< full: every N layers one segment, or the first N
  std::int64_t recompute_layers = 1;  ///< full: that N
  bool recompute_partition = false;   ///< full: each tensor rank keeps its share of a segment's input
  std::int64_t seed = 1234;
  std::int64_t eval_interval = 100;  ///< 0 = never
  std::int64_t eval_iters = 10;
  std::int64_t max_skipped_steps = 20;  ///< consecutive non-finite steps before training stops

  friend bool operator==(const TrainingConfig&, const TrainingConfig&) = default;
};

/// The weight of each of several datasets that are mixed by their sizes.
constexpr double kWeightBySize = -1;

struct DataConfig {
  /// One prefix of .idx/.bin with weight 1, several [weight, prefix], or several prefixes (kWeightBySize).
  std::vector<std::pair<double, std::string>> path = {};
  std::string split = "98,1,1";
  // In place of path and split: data of its own for each of them.
  std::vector<std::pair<double, std::string>> train_path = {};
  std::vector<std::pair<double, std::string>> valid_path = {};
  std::vector<std::pair<double, std::string>> test_path = {};
  std::optional<std::string> args_path = std::nullopt;            ///< a file with the words of path
  std::optional<std::string> per_split_args_path = std::nullopt;  ///< a JSON file with those of the three
  DataLoading loader = DataLoading::mmap;
  std::string tokenizer = "bytes";  ///< "bytes" or the path of a tokenizer.json or vocab.txt
  std::optional<std::string> cache_dir = std::nullopt;
  bool reset_position_ids = false;
  bool reset_attention_mask = false;
  bool eod_mask_loss = false;
  // Samples of sentences: of families that learn masked tokens.
  double mask_prob = 0.15;
  double short_seq_prob = 0.1;
  std::optional<std::int64_t> masking_max_ngram = std::nullopt;  ///< null = 3, of T5 10
  bool masking_do_full_word = true;
  bool masking_use_longer_ngrams = false;
  std::optional<bool> masking_use_geometric_distribution = std::nullopt;  ///< null = false, of T5 true
  std::optional<std::int64_t> cls_id = std::nullopt;  ///< null = the tokenizer's; so the next three
  std::optional<std::int64_t> sep_id = std::nullopt;
  std::optional<std::int64_t> mask_id = std::nullopt;
  std::optional<std::int64_t> pad_id = std::nullopt;
  std::optional<std::int64_t> bos_id = std::nullopt;
  std::optional<std::int64_t> eos_id = std::nullopt;
  std::int64_t vocab_extra_ids = 0;  ///< sentinels; 0 = all that the tokenizer has
  std::vector<std::int64_t> sentinel_ids =
      {};  ///< first and last in the order of use; empty = the tokenizer's

  /// Whether anything names data.
  bool names_data() const {
    return !path.empty() || names_splits() || args_path.has_value() || per_split_args_path.has_value();
  }
  bool names_splits() const { return !train_path.empty() || !valid_path.empty() || !test_path.empty(); }

  friend bool operator==(const DataConfig&, const DataConfig&) = default;
};

struct CheckpointConfig {
  std::optional<std::string> dir = std::nullopt;  ///< null = <logging.dir>/checkpoints
  std::int64_t every = 200;                       ///< 0 = only at the end
  std::int64_t keep = 3;
  std::string resume = "auto";               ///< auto | none | PATH
  bool on_interrupt = false;                 ///< save when SIGINT arrives; SIGTERM always saves
  AutoSwitch async = AutoSwitch::automatic;  ///< whether files are written while training goes on

  friend bool operator==(const CheckpointConfig&, const CheckpointConfig&) = default;
};

struct LoggingConfig {
  std::string dir = "runs/default";
  std::int64_t every = 10;
  std::vector<std::string> trackers = {};
  std::optional<double> peak_tflops = std::nullopt;  ///< of one rank's device, for mfu; null = by its name
  std::vector<std::int64_t> profile = {};            ///< first step and the one after the last; empty = none

  friend bool operator==(const LoggingConfig&, const LoggingConfig&) = default;
};

struct DeviceConfig {
  DeviceChoice type = DeviceChoice::automatic;
  /// CUDA device of this process; null = LOCAL_RANK, so each process of a host has its own.
  std::optional<std::int64_t> index = std::nullopt;
  std::int64_t threads = 0;  ///< CPU threads per process; 0 = all cores
  /// CUDA: launch the passes of a step as one graph; automatic: where a trial shows that it serves.
  AutoSwitch cuda_graph = AutoSwitch::automatic;
  bool tune_gemm = false;  ///< CUDA: time the algorithms of each new matrix product and keep the fastest
  std::optional<std::string> gemm_cache = std::nullopt;  ///< CUDA: file that keeps choices between runs
  /// CUDA: attention that no fast kernel computes is an error, not a slower way.
  bool require_fast_attention = false;
  /// The same run gives the same bits; without, CUDA's attention may add in any order, which is faster.
  bool deterministic = true;
  /// What a plan may fill on one rank, GB of 10^9 bytes; null = what the device has, less a reserve.
  std::optional<double> memory_gb = std::nullopt;

  friend bool operator==(const DeviceConfig&, const DeviceConfig&) = default;
};

/// The sections that are alike before and after they are resolved.
struct Sections {
  ParallelConfig parallel;
  OptimizerConfig optimizer;
  OffloadConfig offload;
  LrScheduleConfig lr_schedule;
  TrainingConfig training;
  DataConfig data;
  CheckpointConfig checkpoint;
  LoggingConfig logging;
  DeviceConfig device;

  friend bool operator==(const Sections&, const Sections&) = default;
};

/// A configuration as somebody writes it. Wherever a `Config` is asked for, it may be given.
struct Settings : Sections {
  ModelSettings model;

  friend bool operator==(const Settings&, const Settings&) = default;
};

/// The resolved configuration: what settings leave open (0 or nullopt) is filled in from the family and from
/// other keys. Nothing else changes. `parallel.data` may stay null: it depends on the processes there are
/// (resolve_layout).
struct Config : Sections {
  ModelConfig model;

  Config(const Settings& settings);
  operator Settings() const;
  friend bool operator==(const Config&, const Config&) = default;
};

/// Tokens of a training sample.
struct SampleLengths {
  std::int64_t tokens = 0;   ///< of what is learned: of a model with encoder and decoder the decoder's
  std::int64_t encoder = 0;  ///< of an encoder's sequence beside it; 0 = there is none
};
SampleLengths sample_lengths(const Config& config);
/// "512 tokens", or "512 tokens and 128 in the decoder".
std::string lengths_text(const Config& config);

}  // namespace tessera
