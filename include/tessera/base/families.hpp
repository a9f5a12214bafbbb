#pragma once
/// What a model family is, said once and as data: the defaults of the section `model`, and how Transformers
/// describes the same model in config.json and names its tensors. Readers and writers interpret the rows.

#include <algorithm>
#include <span>
#include <variant>

#include "tessera/base/config.hpp"

namespace tessera {

/// What a key that is absent stands for: value * times / over.
struct HfDefault {
  double value = 0;
  std::int64_t ModelSettings::*times = nullptr;
  std::int64_t ModelSettings::*over = nullptr;
};

/// A key of config.json that is a field of the section `model`, both ways.
struct HfKey {
  /// cap: a number above 0, or null for none. root: a number whose inverse root the field is.
  enum class Kind { size, positive, probability, flag, cap, root };
  using Field = std::variant<std::int64_t ModelSettings::*, double ModelSettings::*,
                             std::optional<std::int64_t> ModelSettings::*,
                             std::optional<double> ModelSettings::*, std::optional<bool> ModelSettings::*>;
  Kind kind;
  const char* key;
  Field field;
  HfDefault absent;
  const char* alias = nullptr;                   ///< the name that Transformers gives the key in every family
  std::optional<HfDefault> null = std::nullopt;  ///< what null stands for, where that is not `absent`
  double most = 1.0;                             ///< positive: the greatest value
  bool whole_zero = false;                       ///< probability: none is written as 0, not as 0.0

  static HfKey size(const char* key, Field field, HfDefault absent, const char* alias = nullptr) {
    return {Kind::size, key, field, absent, alias};
  }
  static HfKey positive(const char* key, double ModelSettings::*field, double absent, double most = 1.0) {
    return {Kind::positive, key, field, {absent}, nullptr, std::nullopt, most};
  }
  static HfKey probability(const char* key, Field field, double absent) {
    return {Kind::probability, key, field, {absent}};
  }
  static HfKey cap(const char* key, std::optional<double> ModelSettings::*field, double absent) {
    return {Kind::cap, key, field, {absent}};
  }
  static HfKey root(const char* key, std::optional<double> ModelSettings::*field, double absent) {
    return {Kind::root, key, field, {absent}};
  }
  static HfKey flag(const char* key, std::optional<bool> ModelSettings::*field, bool absent) {
    return {Kind::flag, key, field, {absent ? 1.0 : 0.0}};
  }
};

/// The key of the MLP's activation.
struct HfActivations {
  struct Name {
    const char* name;
    MlpActivation value;
  };
  const char* key = "hidden_act";
  std::vector<Name> names;
  MlpActivation absent = MlpActivation::gelu_tanh;
  const char* gelu_tanh = "";  ///< how that one is written; the others by their first name
  const char* supported = "";  ///< "silu is", for messages
  const char* remedy = "";
};

/// Where rotary positions are described, besides rope_scaling and rope_parameters.
struct HfRope {
  const char* theta = "rope_theta";
  const char* fraction = "partial_rotary_factor";
  double absent_fraction = 1.0;
  bool partial = false;  ///< whether less than the whole head may be rotated
  double absent_theta = 10000.0;
  bool interleaved = false;           ///< pairs (2i, 2i+1) instead of (i, i + d/2)
  const char* local_theta = nullptr;  ///< layers with a window have a base of their own, by this key
  double absent_local_theta = 10000.0;
};

/// Which keys a position sees.
struct HfWindow {
  /// by_switch: use_sliding_window, in layers from max_window_layers on, as Qwen2; by_layer: but for every
  /// so manieth layer, as Gemma. Of both layer_types says it first.
  enum class Use { never, always, by_switch, by_layer };
  Use use = Use::never;
  std::int64_t absent = 0;  ///< `sliding_window` where it is absent; 0 = none
  std::int64_t every = 2;   ///< by_layer: one full layer in so many
  const char* every_key = nullptr;
};

/// A key that changes the numbers in a way Tessera does not have, unless it has this value or is absent or
/// null.
struct HfDemand {
  enum class Only { is_true, is_false, zero, one, empty, absent };
  const char* key;
  Only only;
  const char* reason = nullptr;  ///< null = the usual words, like the next
  const char* remedy = nullptr;
};

/// One of a parameter's tensors in a Hugging Face model.
struct HfTensor {
  enum class Rows { all, query, key_value, ffn };
  /// grouped: by key-value head its query heads, its key, its value (GPT-NeoX, BLOOM), where Tessera has all
  /// queries, all keys, all values.
  enum class Order { plain, grouped };
  const char* name;  ///< within the layer or the model, without ".weight"
  Rows rows = Rows::all;
  Order order = Order::plain;
  bool gate = false;     ///< only where the MLP has a gate
  bool plain = false;    ///< only where it has none
  bool outside = false;  ///< beside the language model: its name does not begin with the prefix
};
struct HfParameter {
  const char* ours;  ///< within the layer or the model, without ".weight"
  std::vector<HfTensor> theirs;
  bool (*only)(const ModelConfig&) = nullptr;   ///< there where this holds; null = always
  std::int64_t ModelConfig::*vector = nullptr;  ///< a bare vector of so many values: names are whole
};
/// What stands in place of mlp.linear_fc1 and mlp.linear_fc2 in a layer with experts. A * is an expert's
/// number.
struct HfExperts {
  const char* router = "mlp.gate";
  std::vector<HfTensor> fc1 = {{.name = "mlp.experts.*.gate_proj", .rows = HfTensor::Rows::ffn, .gate = true},
                               {.name = "mlp.experts.*.up_proj", .rows = HfTensor::Rows::ffn}};
  const char* fc2 = "mlp.experts.*.down_proj";
  /// The same as Transformers' modules hold it since its version 5: all experts' weights in one tensor each,
  /// whose names are whole.
  const char* module_router = "mlp.gate";
  const char *module_fc1 = "mlp.experts.gate_up_proj", *module_fc2 = "mlp.experts.down_proj";
};
/// Names of a model's tensors. Norms and linears have ".weight" and, where the model has biases, ".bias".
struct HfNames {
  const char* prefix;  ///< of the full language model's names, but for the head
  const char* layers;  ///< "h." and the like
  const char* embedding;
  const char* positions;  ///< of learned ones
  std::vector<HfParameter> layer;
  const char* final_norm;  ///< null = none
  const char* head = "lm_head";
  const char* stored_head = nullptr;  ///< its name in files, where that is another one
  bool transposed = false;            ///< linears are stored [in, out], as GPT-2's Conv1D does
  /// Globs (one *) of buffers that old versions stored and that hold nothing learned.
  std::vector<const char*> buffers = {};
  /// Beside the layers: what follows the tables of tokens and positions, and what follows the final norm.
  std::vector<HfParameter> front = {}, end = {};
  /// Of an encoder with a decoder: its layers ("encoder.block."), whose parameters `layer` says for the
  /// decoder, and what follows them.
  const char* encoder_layers = nullptr;
  std::vector<HfParameter> encoder_layer = {}, encoder_end = {};
  HfExperts experts = {};
  std::vector<const char*> embedding_copies = {};  ///< further names that files may store the embedding by
};

/// Why a model would not be one of a type.
struct HfNeed {
  bool (*holds)(const ModelConfig&);
  const char* reason;
};

/// An attribute of Transformers' modules that must be what the configuration says.
struct HfAttribute {
  const char* field;
  const char* path;
};

/// One family, or one of Transformers' types that is a case of it.
struct ModelSpec {
  const char* name;  ///< model_type; of a family itself also the YAML's `family`
  Family family;     ///< whose defaults the YAML takes
  /// What models of the type always are, and what a family's models are where the YAML leaves it open.
  ModelSettings model;
  std::int64_t (*ffn_width)(std::int64_t hidden_size) = nullptr;  ///< of a family, where it is left open
  /// The one with a head first; of a family that Transformers has no type for none.
  std::vector<const char*> architectures;
  std::vector<HfKey> keys;
  /// An object in config.json whose keys the others here name as "object.key".
  const char* nested = nullptr;
  HfActivations activations;
  HfRope rope = {};
  HfWindow window = {};
  bool padding_row = false;                                   ///< pad_token_id's embedding gets no gradient
  std::optional<std::int64_t> absent_padding = std::nullopt;  ///< pad_token_id where it is absent
  /// Architectures are a model with a binary head, one without, and one with a head for classes of samples.
  bool heads_by_architecture = false;
  /// Falcon's parallel_attn, new_decoder_architecture, multi_query and num_ln_in_parallel_attn together say
  /// which norms and how many key and value heads there are.
  bool falcon_layers = false;
  /// decoder_sparse_step and mlp_only_layers say which layers have experts.
  bool sparse_layers = false;
  std::vector<HfDemand> demands = {};
  std::vector<std::pair<const char*, bool>> constants = {};  ///< written always
  /// Keys with names as of something that counts, which Transformers' model of this type does not read.
  std::vector<const char*> inert = {};
  HfNames names;
  bool names_untyped = false;  ///< decoders that Transformers has no type for go by these names
  std::vector<HfNeed> needs = {};
  std::vector<HfAttribute> attributes = {};
  const char* megatron_tokenizer = "GPT2BPETokenizer";  ///< Megatron's --tokenizer-type
  const char* body = "decoder";  ///< of a family: what builds its models (nn/bodies.hpp)
  bool encoder_decoder = false;  ///< of a family: an encoder reads a sequence of its own
  /// Of one with a tied head or its own, what the weights say: a head that is not the embedding is its own.
  bool head_by_weights = false;
  /// What a sample of its training data is made of.
  enum class Samples {
    tokens,            ///< the next tokens of joined documents
    masked_sentences,  ///< two runs of sentences with masked tokens
    corrupted_spans    ///< an encoder's sentences with runs of words left out, which the decoder says
  };
  Samples samples = Samples::tokens;

  bool is_family() const { return family.name == name; }
  /// Whether config.json says this field.
  bool reads(HfKey::Field field) const {
    return std::ranges::any_of(keys, [&](const HfKey& key) { return key.field == field; });
  }
};

/// Every row, in the order in which messages list them.
std::span<const ModelSpec> families();
/// The row of a model_type; null for another one.
const ModelSpec* find_spec(std::string_view name);
/// The row of a family.
const ModelSpec& spec_of(Family family);

/// Why a model has a setting that no layer of its family reads, so that it would be passed over
/// without a word; "" where it has none.
std::string setting_of_others(const ModelConfig& config);

}  // namespace tessera
