#pragma once
/// Checkpoints of Megatron-LM (mp_rank_TT_PPP/model_optim_rng.pt, of every age of its names) as Tessera's
/// parameters, and back, without PyTorch. Nothing in such a file is run.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/checkpoint/hf.hpp"
#include "tessera/checkpoint/run_source.hpp"

namespace tessera {

struct MegatronReadOptions {
  /// Tokens that the tokenizer has: rows beyond it are padding. Nothing = what the checkpoint's arguments
  /// say; where they do not, all rows are kept.
  std::optional<std::int64_t> vocab_size = std::nullopt;
  SymbolicLinks links = SymbolicLinks::within_folder;
};

/// The weights of a checkpoint, put together from all of its ranks, under Tessera's names and in Tessera's
/// layout.
class MegatronModel : public WeightSource {
 public:
  ~MegatronModel() override;
  MegatronModel(MegatronModel&&) noexcept;

  const Architecture& config() const;
  /// 0 for a release.
  std::int64_t iteration() const;
  /// What the checkpoint holds that is not taken over, and what was decided on the way: a sentence each.
  const std::vector<std::string>& notes() const;
  std::vector<TensorSpec> tensors() const override;
  /// Errors: CheckpointError where ranks hold different values of what they share; IoError.
  void read(const std::string& name, std::span<std::byte> out) const override;
  bool read_box(const std::string& name, const TensorSlice& box, std::span<std::byte> out) const override;

  struct Impl;

 private:
  explicit MegatronModel(std::unique_ptr<Impl> impl);
  friend MegatronModel open_megatron(const std::filesystem::path&, const MegatronReadOptions&);
  std::unique_ptr<Impl> impl_;
};

/// Opens a checkpoint: its folder (the one with latest_checkpointed_iteration.txt) or that of one iteration.
/// Errors: CheckpointError with all that is missing, unexpected or of another shape, with a setting of the
/// model that Tessera does not have, with ranks that are not there or are of another iteration; IoError.
MegatronModel open_megatron(const std::filesystem::path& dir, const MegatronReadOptions& options = {});

/// The same with its optimizer (Adam's state, plain or distributed, of 2024 and later), its counters and
/// settings: what a run goes on with. What is not taken over, or was decided, is said in `notes`. Errors:
/// also CheckpointError for a state that is not there or of a kind that is not read, and for settings that
/// Tessera has nothing for.
std::unique_ptr<RunSource> open_megatron_run(const std::filesystem::path& dir,
                                             const MegatronReadOptions& options,
                                             std::vector<std::string>& notes);

struct MegatronExportOptions {
  std::int64_t tensor = 1, pipeline = 1;  ///< ranks to write for; heads and layers divide by them
  std::int64_t virtual_stages = 1;        ///< of each pipeline rank: `model0`, `model1`, ... in its file
  std::int64_t data = 1;                  ///< named in the arguments
  /// Files as Megatron's distributed optimizer has them: of a run those of 2024 and later, of weights alone
  /// those of 2022 and 2023, the weights apart from a file of each data rank.
  bool distributed_optimizer = false;
  /// Of a run: Adam's state as PyTorch's own has it, which Megatron takes where neither Apex nor Transformer
  /// Engine is installed. It counts updates by parameter, which theirs do not load. The distributed
  /// optimizer's state is the same for all three.
  bool torch_adam = false;
  std::optional<DType> dtype = std::nullopt;  ///< float32, bfloat16 or float16; nothing = as the weights are
  std::int64_t vocab_divisible_by = 128;      ///< times `tensor`: the vocabulary is padded to a multiple
  /// Names of the model's tensors: those of Megatron's own GPT model (2021 and later), or those of Megatron
  /// Core's with local layers or with Transformer Engine's.
  enum class Names { legacy, local, transformer_engine };
  Names names = Names::legacy;
  /// A file of each rank, or one checkpoint that any layout loads (`--ckpt-format torch_dist`): its tensors
  /// have one set of names, and ranks and stages are only named in its arguments.
  enum class Format { torch, torch_dist };
  Format format = Format::torch;
};
/// Writes `out`/release (mp_rank_.. with an optimizer at its step 0 that has no state, as Transformers'
/// converter does; or the files of torch_dist) and `out`/latest_checkpointed_iteration.txt. `out` must not
/// exist or be empty; it appears only complete. Rows of padding are copies of the last one. Errors:
/// InvalidArgument if the weights do not fit the config; ConfigError for a model that Megatron does not have,
/// or ranks that do not divide it; CheckpointError if `out` is in use; IoError.
void export_megatron(const std::filesystem::path& out, const Architecture& config,
                     const WeightSource& weights, const MegatronExportOptions& options = {});

/// Writes a run as Megatron goes on with it: `out`/iter_NNNNNNN/mp_rank_../model_optim_rng.pt (or the files
/// of torch_dist) with Adam's state, fp32 main weights, the schedule and the arguments. Errors: as above;
/// ConfigError also for settings that Megatron has nothing for, and for a type in `options`.
void export_megatron_run(const std::filesystem::path& out, const RunSource& run,
                         const MegatronExportOptions& options = {});

/// What a file of torch.save holds, as JSON text: a tensor is {"tensor": type, "shape": [...]}, a namespace
/// {"namespace": {...}}, anything else that is no plain value {"object": its class, ...}. Values of tensors
/// are not read. Errors: CheckpointError, IoError.
std::string torch_file_json(const std::filesystem::path& file, SymbolicLinks links = SymbolicLinks::follow);

}  // namespace tessera
