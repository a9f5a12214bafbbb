#pragma once
/// Hugging Face model folders (config.json + safetensors) as Tessera parameters, and back, bit for bit.
///
/// GPT-2 and, with one key and value head, GPTBigCode; Llama, and of its shape also Mistral and Qwen2;
/// Starcoder2, a GPT-2 with rotary positions. A Tessera folder holds tessera.json, model.safetensors with
/// Tessera's names, and what is needed to write the original folder again; it also holds decoders that
/// Hugging Face has no model type for.

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/checkpoint/safetensors.hpp"
#include "tessera/checkpoint/tensor_view.hpp"

namespace tessera {

/// How rotary frequencies are stretched beyond the trained length.
struct HfRopeScaling {
  std::string type = "none";  ///< none | linear | llama3
  double factor = 1.0;
  double low_freq_factor = 1.0;  ///< llama3 only, like the next two
  double high_freq_factor = 4.0;
  std::int64_t original_max_positions = 0;

  friend bool operator==(const HfRopeScaling&, const HfRopeScaling&) = default;
};

/// A decoder's architecture in Tessera's vocabulary.
struct HfModelConfig {
  std::string family;      ///< gpt2 | llama
  std::string model_type;  ///< Hugging Face's, by which its tensors are named: one of hf_model_types()
  std::int64_t num_layers = 0;
  std::int64_t hidden_size = 0;
  std::int64_t num_heads = 0;
  std::int64_t num_kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t ffn_hidden_size = 0;
  std::int64_t vocab_size = 0;
  std::int64_t max_positions = 0;
  double norm_eps = 1e-5;
  std::string activation;  ///< gelu_tanh | gelu | relu | swiglu
  bool tied_head = true;
  bool qkv_bias = false;
  bool proj_bias = false;                      ///< of self_attention.linear_proj
  bool linear_bias = false;                    ///< of mlp.linear_fc1 and mlp.linear_fc2
  std::string position_embedding = "learned";  ///< learned | rotary | alibi | none
  std::string norm = "layernorm";              ///< layernorm | rmsnorm
  double rope_theta = 10000.0;
  double rope_fraction = 1.0;     ///< share of each head's features that is rotated
  bool rope_interleaved = false;  ///< pairs (2i, 2i+1) instead of (i, i + d/2)
  HfRopeScaling rope_scaling;
  double dropout = 0.0;  ///< on embeddings and residual branches
  double attention_dropout = 0.0;
  double init_std = 0.02;
  std::optional<double> embedding_dropout = std::nullopt;     ///< where it is not `dropout`
  std::optional<std::int64_t> sliding_window = std::nullopt;  ///< keys a position sees
  std::optional<std::int64_t> padding_id = std::nullopt;      ///< token whose lookup gives no gradient

  friend bool operator==(const HfModelConfig&, const HfModelConfig&) = default;
};

/// Hugging Face's model types that are read and written.
const std::vector<std::string>& hf_model_types();
/// Why Transformers' model of this type would not be this architecture; "" if it would. Of the type "": why
/// none of them would.
std::string hf_misfit(const HfModelConfig& config, const std::string& model_type);
/// The type that Transformers has for an architecture: its own if that fits, else the first that does.
/// Nothing where there is none.
std::optional<std::string> hf_model_type_of(const HfModelConfig& config);

/// Reads the text of a config.json. A key that is absent has the default of Transformers' config class.
/// Errors: ConfigError naming the key that is not supported, and what is.
HfModelConfig parse_hf_config(const std::string& text, const std::string& origin);
/// A config.json for this architecture: `base` (JSON object text, or "") with the architecture's keys
/// replaced. Errors: ConfigError for one that is not of its model type.
std::string make_hf_config(const HfModelConfig& config, const std::string& base, DType dtype);
/// The same architecture as the `model` object of tessera.json (Tessera's YAML keys), and back.
std::string to_model_json(const HfModelConfig& config);
HfModelConfig parse_model_json(const std::string& text, const std::string& origin);
/// Reads either: the text of a config.json, or what to_model_json wrote.
HfModelConfig parse_architecture(const std::string& text, const std::string& origin);

/// A tensor of a Hugging Face model.
struct HfPart {
  std::string name;
  Shape shape;
  bool transposed = false;  ///< stored [in, out], as GPT-2's Conv1D does
};
/// A Tessera parameter: its parts one after another along the first dimension.
struct HfMapping {
  std::string name;
  Shape shape;
  std::vector<HfPart> parts;
};
/// Which Hugging Face tensors make up the parameters of an architecture, in the model's order. A tied head is
/// not among them.
std::vector<HfMapping> hf_mappings(const HfModelConfig& config);

/// Names and shapes of Tessera's parameters for an architecture, in the model's order; dtype is float32.
std::vector<TensorSpec> parameter_specs(const HfModelConfig& config);

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

/// The weights of a model folder under Tessera's names and in Tessera's layout.
class HfModel : public WeightSource {
 public:
  ~HfModel() override;
  HfModel(HfModel&&) noexcept;

  const HfModelConfig& config() const;
  /// Where the weights come from; null for a Tessera folder that was not converted from Hugging Face.
  const HfSource* source() const;
  const std::filesystem::path& dir() const;
  std::vector<TensorSpec> tensors() const override;
  void read(const std::string& name, std::span<std::byte> out) const override;
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
  friend HfModel hf_in_memory(const std::string& architecture, std::vector<TensorView> tensors);
  std::unique_ptr<Impl> impl_;
};

/// Opens a Hugging Face folder, after settle_directory(). Errors: CheckpointError with everything that is
/// unsupported, with all tensors that are missing, unexpected or of another shape, or with a link that may
/// not be followed; IoError.
HfModel open_hf(const std::filesystem::path& dir, SymbolicLinks links = SymbolicLinks::within_folder);
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
  std::uint64_t max_shard_bytes = 5'000'000'000;
  SymbolicLinks links = SymbolicLinks::within_folder;  ///< of those tokenizer files
};
/// Writes a Hugging Face folder that from_pretrained loads. `out` must not exist or be empty; it appears only
/// complete. Errors: InvalidArgument if the weights do not fit the config; CheckpointError if `out` is in
/// use; IoError.
void export_hf(const std::filesystem::path& out, const HfModelConfig& config, const WeightSource& weights,
               const ExportOptions& options = {});
/// Writes a Tessera folder, under the same conditions.
void export_tessera(const std::filesystem::path& out, const HfModelConfig& config,
                    const WeightSource& weights, const ExportOptions& options = {});

/// Only the files of either, checked, into a folder that is there, such as a StagedDirectory's. Errors: as
/// above.
void write_hf(const std::filesystem::path& folder, const HfModelConfig& config, const WeightSource& weights,
              const ExportOptions& options = {});
void write_tessera(const std::filesystem::path& folder, const HfModelConfig& config,
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
