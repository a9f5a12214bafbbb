#pragma once
/// Hugging Face model folders (config.json + safetensors) as Tessera parameters, and back, bit for bit.
///
/// Which models that are is said by the rows of base/families.hpp. A Tessera folder holds tessera.json,
/// model.safetensors with Tessera's names, and what is needed to write the original folder again; it also
/// holds decoders that Hugging Face has no model type for.

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/base/config.hpp"
#include "tessera/checkpoint/run_source.hpp"
#include "tessera/checkpoint/safetensors.hpp"
#include "tessera/checkpoint/tensor_view.hpp"

namespace tessera {

/// A decoder, and the one of Transformers' types by which its tensors are named.
struct Architecture {
  ModelConfig model = ModelSettings{};  ///< as architecture_of leaves it
  std::string type = {};                ///< one of hf_model_types(), or "" where Transformers has none

  friend bool operator==(const Architecture&, const Architecture&) = default;
};
/// A section `model` as an architecture: without what says how it is trained, and each model spelt
/// in one way only. Its type is hf_model_type_of's.
Architecture architecture_of(const ModelConfig& config);

/// Hugging Face's model types that are read and written.
std::vector<std::string> hf_model_types();
/// Why Transformers' model of this type would not be this one; "" if it would. Of the type "": why none of
/// them would.
std::string hf_misfit(const ModelConfig& model, const std::string& type);
/// The type that Transformers has for an architecture: its own if that fits, else the first that does.
/// Nothing where there is none.
std::optional<std::string> hf_model_type_of(const Architecture& config);

/// Reads the text of a config.json. A key that is absent has the default of Transformers' config class.
/// Errors: ConfigError naming the key that is not supported, and what is.
Architecture parse_hf_config(const std::string& text, const std::string& origin);
/// A config.json for this architecture: `base` (JSON object text, or "") with the architecture's keys
/// replaced. Errors: ConfigError for one that is not of its model type.
std::string make_hf_config(const Architecture& config, const std::string& base, DType dtype);
/// The same architecture as the `model` object of tessera.json (Tessera's YAML keys), and back.
std::string to_model_json(const Architecture& config);
Architecture parse_model_json(const std::string& text, const std::string& origin);
/// Reads either: the text of a config.json, or what to_model_json wrote.
Architecture parse_architecture(const std::string& text, const std::string& origin);

/// A tensor of a Hugging Face model.
struct HfPart {
  std::string name;
  Shape shape;
  bool transposed = false;  ///< stored [in, out], as GPT-2's Conv1D does
  /// Above 0: the rows are stored in as many groups, each with its query heads, its key, its value. Rows of
  /// one head: head_dim.
  std::int64_t groups = 0;
  std::int64_t head_dim = 0;
  /// Not below 0: the tensor holds shape[0] of them, one after the other, and this is the one meant.
  std::int64_t member = -1;
};
/// A Tessera parameter: its parts one after another along the first dimension.
struct HfMapping {
  std::string name;
  Shape shape;
  std::vector<HfPart> parts;
};
/// Which Hugging Face tensors make up the parameters of an architecture, in the model's order. A tied head is
/// not among them.
std::vector<HfMapping> hf_mappings(const Architecture& config);
/// The same by the parameters of Transformers' modules, which may hold the weights of all experts in one.
std::vector<HfMapping> hf_module_mappings(const Architecture& config);

/// Where row `row` of a part with groups is stored.
std::int64_t stored_row(const HfPart& part, std::int64_t row);

/// Names and shapes of Tessera's parameters for an architecture, in the model's order; dtype is float32.
std::vector<TensorSpec> parameter_specs(const Architecture& config);

/// What a Hugging Face folder was like beyond its values: enough to write the same set of names and files
/// again.
struct HfSource {
  std::string prefix;  ///< "transformer.", "model." or ""
  std::vector<std::string>
      embedding_names;  ///< names that hold the embedding: with a tied head lm_head.weight may be one
  std::vector<std::string> ignored;               ///< buffers that were there and are not kept
  std::map<std::string, std::string> weight_map;  ///< tensor → file
  std::map<std::string, std::map<std::string, std::string>> file_metadata;
  bool has_index = false;
  std::string index_metadata;
  std::string config_json;  ///< the config.json, byte for byte
};

/// Named weights that can be read one by one.
class WeightSource {
 public:
  virtual ~WeightSource() = default;
  /// Tessera's names, shapes and the dtypes read() delivers.
  virtual std::vector<TensorSpec> tensors() const = 0;
  /// Reads one tensor, contiguous, in its dtype.
  virtual void read(const std::string& name, std::span<std::byte> out) const = 0;
  /// Reads a box of a tensor, contiguous. False: only whole tensors are read here. One call at a time, but
  /// not always from the same thread.
  virtual bool read_box(const std::string& /*name*/, const TensorSlice& /*box*/,
                        std::span<std::byte> /*out*/) const {
    return false;
  }
};

/// Weights that lie in host memory.
class ViewSource : public WeightSource {
 public:
  /// `owner` holds the memory of the views, if nobody else does.
  explicit ViewSource(std::vector<TensorView> views, std::shared_ptr<void> owner = nullptr)
      : views_(std::move(views)), owner_(std::move(owner)) {}
  std::vector<TensorSpec> tensors() const override;
  void read(const std::string& name, std::span<std::byte> out) const override;

 private:
  std::vector<TensorView> views_;
  std::shared_ptr<void> owner_;
};

/// Checkpoints of PyTorch programs that hold a Transformers model under its own names.
enum class TorchFormat {
  dcp,        ///< torch.distributed.checkpoint: a folder with `.metadata`
  deepspeed,  ///< save_checkpoint of DeepSpeed, ZeRO-1 to -3, or its universal form
  accelerate  ///< save_state of Accelerate, also with FSDP or DeepSpeed; a folder with pytorch_model.bin
};

/// What was found beside the tensors of one.
struct TorchFacts {
  std::vector<std::string> notes;         ///< what is not taken over, or was decided: a sentence each
  std::int64_t moments = 0;               ///< tensors of an optimizer, where weights are asked for
  std::int64_t updates = -1;              ///< that the optimizer has made; of moments only, -1 = not said
  std::int64_t steps = -1, samples = -1;  ///< iterations and samples that the program counted; -1 = not said
};

/// The weights of a model folder under Tessera's names and in Tessera's layout.
class HfModel : public WeightSource {
 public:
  ~HfModel() override;
  HfModel(HfModel&&) noexcept;

  const Architecture& config() const;
  /// Where the weights come from; null for a Tessera folder that was not converted from Hugging Face.
  const HfSource* source() const;
  const std::filesystem::path& dir() const;
  std::vector<TensorSpec> tensors() const override;
  void read(const std::string& name, std::span<std::byte> out) const override;
  bool read_box(const std::string& name, const TensorSlice& box, std::span<std::byte> out) const override;
  /// Reads one tensor converted to float32.
  void read_f32(const std::string& name, std::span<float> out) const;
  /// Reads a box of one; of a file no more than that.
  void read_f32(const std::string& name, const TensorSlice& slice, std::span<float> out) const;
  /// A hash of each Hugging Face tensor's name, dtype and bytes, in the order of hf_mappings' parts: equal
  /// for equal weights. Of a file no more than 16 evenly spread blocks of rows of each tensor are read.
  std::vector<std::uint64_t> digests() const;

 private:
  struct Impl;
  explicit HfModel(std::unique_ptr<Impl> impl);
  friend HfModel open_hf(const std::filesystem::path& dir, SymbolicLinks links);
  friend HfModel open_tessera(const std::filesystem::path& dir, SymbolicLinks links);
  friend HfModel open_torch(TorchFormat format, const std::filesystem::path& dir,
                            const std::filesystem::path& config, TorchFacts& facts, SymbolicLinks links,
                            RunValue value);
  friend HfModel hf_in_memory(const std::string& architecture, std::vector<TensorView> tensors);
  std::unique_ptr<Impl> impl_;
};

/// Opens a Hugging Face folder, after settle_directory(). Errors: CheckpointError with everything that is
/// unsupported, with all tensors that are missing, unexpected or of another shape, or with a link that may
/// not be followed; IoError.
HfModel open_hf(const std::filesystem::path& dir, SymbolicLinks links = SymbolicLinks::within_folder);
/// The config.json of weights whose folder need not have one: the one that is named, by itself or by its
/// folder, else that beside the weights or in the folder above. Errors: CheckpointError.
std::filesystem::path config_of(const std::filesystem::path& weights, const std::filesystem::path& named);
/// Opens the weights of a checkpoint of PyTorch, or one of Adam's moments as if they were the weights.
/// `config`: the model's config.json. Nothing of it is run. Errors: as open_hf; no optimizer, or one that is
/// not Adam.
HfModel open_torch(TorchFormat format, const std::filesystem::path& dir, const std::filesystem::path& config,
                   TorchFacts& facts, SymbolicLinks links = SymbolicLinks::within_folder,
                   RunValue value = RunValue::weight);
/// A run that goes on from a checkpoint of PyTorch: weights and Adam's moments, and how many updates were
/// made. How it goes on is said by `settings`, whose model is config.json's where it has none; their batch
/// counts the samples where the checkpoint does not. Errors: as open_torch; ConfigError where the two models
/// differ, the run would be over or its optimizer is not Adam.
std::unique_ptr<RunSource> open_torch_run(TorchFormat format, const std::filesystem::path& dir,
                                          const std::filesystem::path& config, const Config& settings,
                                          TorchFacts& facts,
                                          SymbolicLinks links = SymbolicLinks::within_folder);
/// A model whose tensors, under Hugging Face's names, are in memory that outlives the result; a tied head may
/// be left out. `architecture`: for parse_architecture. Errors: as open_hf.
HfModel hf_in_memory(const std::string& architecture, std::vector<TensorView> tensors);
/// Opens a Tessera folder.
HfModel open_tessera(const std::filesystem::path& dir, SymbolicLinks links = SymbolicLinks::within_folder);
/// Opens either, whichever it is.
HfModel open_model(const std::filesystem::path& dir, SymbolicLinks links = SymbolicLinks::within_folder);
/// Whether it is one or the other, after settle_directory().
bool is_model_folder(const std::filesystem::path& dir);

/// The text of a model folder's tessera.json or, where there is none, config.json, unread.
struct ModelDescription {
  bool is_tessera = false;
  std::string text;
};
/// Errors: CheckpointError, IoError.
ModelDescription read_model_description(const std::filesystem::path& dir,
                                        SymbolicLinks links = SymbolicLinks::within_folder);

struct ExportOptions {
  std::optional<DType> dtype;         ///< float32, bfloat16 or float16; nothing = as the weights are
  const HfSource* source = nullptr;   ///< write the names, files and config.json of this folder again
  std::filesystem::path extra_files;  ///< folder whose tokenizer files are copied along; empty = none
  /// Of a file of weights; nothing = the files of `source`, or 5 GB.
  std::optional<std::uint64_t> max_shard_bytes = std::nullopt;
  SymbolicLinks links = SymbolicLinks::within_folder;  ///< of those tokenizer files
};
/// Writes a Hugging Face folder that from_pretrained loads. `out` must not exist or be empty; it appears only
/// complete. Errors: InvalidArgument if the weights do not fit the config; CheckpointError if `out` is in
/// use; IoError.
void export_hf(const std::filesystem::path& out, const Architecture& config, const WeightSource& weights,
               const ExportOptions& options = {});
/// Writes a Tessera folder, under the same conditions.
void export_tessera(const std::filesystem::path& out, const Architecture& config, const WeightSource& weights,
                    const ExportOptions& options = {});

/// Writes a folder of torch.distributed.checkpoint under Transformers' names, with the model's config.json,
/// under the same conditions. `key`: of the dict that the weights are in, as programs load them ({"model":
/// state_dict}); "" = none.
void export_dcp(const std::filesystem::path& out, const Architecture& config, const WeightSource& weights,
                const std::string& key = "model", const ExportOptions& options = {});

/// Only the files of either, checked, into a folder that is there, such as a StagedDirectory's. Errors: as
/// above.
void write_hf(const std::filesystem::path& folder, const Architecture& config, const WeightSource& weights,
              const ExportOptions& options = {});
void write_tessera(const std::filesystem::path& folder, const Architecture& config,
                   const WeightSource& weights, const ExportOptions& options = {});

/// Hugging Face folder → Tessera folder, values and dtypes as they are.
void convert_from_hf(const std::filesystem::path& dir, const std::filesystem::path& out,
                     SymbolicLinks links = SymbolicLinks::within_folder);
/// Tessera folder → Hugging Face folder: the same names, shapes, dtypes and files it once came from.
void convert_to_hf(const std::filesystem::path& dir, const std::filesystem::path& out,
                   SymbolicLinks links = SymbolicLinks::within_folder);

/// Converts between float32, bfloat16 and float16, rounding to nearest even. Errors: InvalidArgument for
/// other dtypes.
void convert_floats(DType from, std::span<const std::byte> in, DType to, std::span<std::byte> out);

}  // namespace tessera
