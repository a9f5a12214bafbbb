#pragma once
/// The nine sections of a training configuration, one plain struct each: what a floor needs it takes as its
/// own struct. The YAML keys are the member names. Reading, checking and printing them: config_file.hpp.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera {

/// A row of families() (base/families.hpp), by its name there, whose defaults fill in what a model leaves
/// open.
struct Family {
  std::string_view name = "gpt2";  ///< a literal
  static const Family gpt2, llama;

  friend bool operator==(const Family&, const Family&) = default;
};
inline constexpr Family Family::gpt2{"gpt2"};
inline constexpr Family Family::llama{"llama"};

enum class PositionKind { learned, rotary, alibi, none };
enum class NormStyle { layernorm, rmsnorm };
enum class MlpActivation { gelu_tanh, gelu, relu, swiglu };
enum class Precision { fp32, bf16, fp16 };
enum class Recompute { none, selective, full, automatic };
enum class RecomputeMethod { uniform, block };
enum class PipelineSchedule { gpipe, one_f_one_b, interleaved, zb_h1, zb_v };
enum class OptimizerName { adamw, adam, sgd };
enum class LrStyle { constant, linear, cosine, inverse_sqrt, wsd };
enum class WsdStyle { linear, cosine, exponential, minus_sqrt };
enum class WeightDecayStyle { constant, linear, cosine };
enum class DeviceChoice { automatic, cpu, cuda };
enum class GraphUse { automatic, off, on };

/// The YAML spelling of a value: "gpt2", "1f1b", "inverse-square-root", "auto", ...
std::string_view name_of(Family value);
std::string_view name_of(PositionKind value);
std::string_view name_of(NormStyle value);
std::string_view name_of(MlpActivation value);
std::string_view name_of(Precision value);
std::string_view name_of(Recompute value);
std::string_view name_of(RecomputeMethod value);
std::string_view name_of(PipelineSchedule value);
std::string_view name_of(OptimizerName value);
std::string_view name_of(LrStyle value);
std::string_view name_of(WsdStyle value);
std::string_view name_of(WeightDecayStyle value);
std::string_view name_of(DeviceChoice value);
std::string_view name_of(GraphUse value);

/// Llama-3 frequency scaling of rotary embeddings; factor 1 = none.
struct RopeScaling {
  double factor = 1.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  std::int64_t original_max_positions = 8192;

  friend bool operator==(const RopeScaling&, const RopeScaling&) = default;
};

/// model: the decoder. Values of 0 or nullopt are filled in by `resolve`, from other keys or the family's
/// row.
struct ModelConfig {
  Family family = {};
  std::int64_t num_layers = 12;
  std::int64_t hidden_size = 768;
  std::int64_t num_heads = 12;
  std::int64_t num_kv_heads = 0;     ///< 0 = num_heads
  std::int64_t head_dim = 0;         ///< 0 = hidden_size / num_heads
  std::int64_t ffn_hidden_size = 0;  ///< 0 = the family's rule
  std::int64_t vocab_size = 50257;
  std::int64_t max_positions = 1024;
  double dropout = 0.0;  ///< on embeddings and residual branches
  double attention_dropout = 0.0;
  std::optional<double> embedding_dropout = std::nullopt;  ///< null = dropout
  std::optional<PositionKind> position_embedding = std::nullopt;
  std::optional<NormStyle> norm = std::nullopt;
  double norm_eps = 1e-5;
  std::optional<MlpActivation> activation = std::nullopt;
  std::optional<bool> tied_head = std::nullopt;
  std::optional<bool> linear_bias = std::nullopt;  ///< biases of the output projection and the MLP
  std::optional<bool> proj_bias = std::nullopt;    ///< of the output projection alone; null = linear_bias
  std::optional<bool> qkv_bias = std::nullopt;
  std::optional<bool> parallel_residual = std::nullopt;  ///< attention and MLP read the same residual stream
  std::optional<std::int64_t> sliding_window = std::nullopt;  ///< a bound on sequences: see nn/model.hpp
  std::optional<std::int64_t> padding_id = std::nullopt;      ///< token whose lookup gives no gradient
  double rope_theta = 10000.0;
  double rope_fraction = 1.0;     ///< share of each head's features that is rotated
  bool rope_interleaved = false;  ///< pairs (2i, 2i+1) instead of (i, i + d/2)
  RopeScaling rope_scaling = {};
  double init_std = 0.02;
  std::optional<std::string> init_from =
      std::nullopt;           ///< Hugging Face folder or converted folder to start from
  bool reinitialize = false;  ///< init_from may be of another model: what does not fit is drawn anew

  friend bool operator==(const ModelConfig&, const ModelConfig&) = default;
};

/// parallel: the layout, how the work is divided among processes.
struct ParallelConfig {
  std::int64_t tensor = 1;
  bool sequence = false;
  std::int64_t tensor_chunks = 0;  ///< as TensorParallel::chunks; on the CPU 0 is 1
  std::int64_t pipeline = 1;
  std::int64_t virtual_stages = 1;
  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
  std::optional<std::string> pipeline_layout = std::nullopt;
  std::int64_t context = 1;
  std::int64_t expert = 1;
  std::optional<std::int64_t> data = std::nullopt;
  std::int64_t zero_stage = 1;
  double timeout_s = 600;

  friend bool operator==(const ParallelConfig&, const ParallelConfig&) = default;
};

struct OptimizerConfig {
  OptimizerName name = OptimizerName::adamw;
  double lr = 6e-4;
  std::vector<double> betas = {0.9, 0.95};
  double eps = 1e-8;
  double weight_decay = 0.1;
  double momentum = 0.9;   ///< sgd only
  bool nesterov = false;   ///< sgd only
  double clip_grad = 1.0;  ///< 0 = off
  /// Parameters whose name matches one of these globs get no weight decay, besides biases and norms (1-D
  /// tensors).
  std::vector<std::string> no_decay = {};
  bool split_main_weights = false;  ///< bf16: fp32 main weights as the bf16 weights and their low 16 bits

  friend bool operator==(const OptimizerConfig&, const OptimizerConfig&) = default;
};

struct LrScheduleConfig {
  LrStyle style = LrStyle::cosine;
  std::int64_t warmup_steps = 0;
  std::int64_t decay_steps = 0;  ///< 0 = training.steps
  double min_lr = 0.0;
  double init_lr = 0.0;  ///< at step 0 of the warm-up
  WsdStyle wsd_style = WsdStyle::exponential;
  std::int64_t wsd_decay_steps = 0;
  WeightDecayStyle weight_decay_style = WeightDecayStyle::constant;
  std::optional<double> end_weight_decay = std::nullopt;  ///< null = optimizer.weight_decay throughout

  friend bool operator==(const LrScheduleConfig&, const LrScheduleConfig&) = default;
};

struct TrainingConfig {
  std::int64_t steps = 1000;
  std::int64_t seq_length = 1024;
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

struct DataConfig {
  /// One prefix of .idx/.bin with weight 1, or several [weight, prefix].
  std::vector<std::pair<double, std::string>> path = {};
  std::string split = "98,1,1";
  std::string tokenizer = "bytes";  ///< "bytes" or the path of a tokenizer.json
  std::optional<std::string> cache_dir = std::nullopt;
  bool reset_position_ids = false;
  bool reset_attention_mask = false;
  bool eod_mask_loss = false;

  friend bool operator==(const DataConfig&, const DataConfig&) = default;
};

struct CheckpointConfig {
  std::optional<std::string> dir = std::nullopt;  ///< null = <logging.dir>/checkpoints
  std::int64_t every = 200;                       ///< 0 = only at the end
  std::int64_t keep = 3;
  std::string resume = "auto";  ///< auto | none | PATH
  bool on_interrupt = false;    ///< save when SIGINT arrives; SIGTERM always saves

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
  GraphUse cuda_graph = GraphUse::automatic;
  bool tune_gemm = false;  ///< CUDA: time the algorithms of each new matrix product and keep the fastest
  std::optional<std::string> gemm_cache = std::nullopt;  ///< CUDA: file that keeps choices between runs
  /// CUDA: attention that no fast kernel computes is an error, not a slower way.
  bool require_fast_attention = false;
  /// What a plan may fill on one rank, GB of 10^9 bytes; null = what the device has, less a reserve.
  std::optional<double> memory_gb = std::nullopt;

  friend bool operator==(const DeviceConfig&, const DeviceConfig&) = default;
};

struct Config {
  ModelConfig model;
  ParallelConfig parallel;
  OptimizerConfig optimizer;
  LrScheduleConfig lr_schedule;
  TrainingConfig training;
  DataConfig data;
  CheckpointConfig checkpoint;
  LoggingConfig logging;
  DeviceConfig device;

  friend bool operator==(const Config&, const Config&) = default;
};

}  // namespace tessera
