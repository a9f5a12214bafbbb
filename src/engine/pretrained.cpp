#include "tessera/engine/pretrained.hpp"

#include <memory>
#include <optional>

#include "engine/ranks.hpp"
#include "tessera/base/config_file.hpp"
#include "tessera/comm/heartbeat.hpp"
#include "tessera/ops/elementwise.hpp"

namespace tessera {
namespace {

MlpActivation activation_of(const std::string& name) {
  if (name == "gelu_tanh") return MlpActivation::gelu_tanh;
  if (name == "gelu") return MlpActivation::gelu;
  if (name == "relu") return MlpActivation::relu;
  if (name == "swiglu") return MlpActivation::swiglu;
  throw CheckpointError("activation " + name + " is not supported: gelu_tanh, gelu, relu and swiglu are");
}

PositionKind positions_of(const std::string& name) {
  for (const PositionKind kind :
       {PositionKind::learned, PositionKind::rotary, PositionKind::alibi, PositionKind::none}) {
    if (name == name_of(kind)) return kind;
  }
  throw CheckpointError("positions " + name + " are not known");
}

RopeScaling scaling_of(const HfRopeScaling& hf) {
  if (hf.type == "none") return {};
  if (hf.type == "llama3")
    return {hf.factor, hf.low_freq_factor, hf.high_freq_factor, hf.original_max_positions};
  // Position interpolation is Llama-3's rule with every wavelength counted as long.
  return {hf.factor, 1.0, 4.0, 1};
}

HfRopeScaling hf_scaling_of(const RopeScaling& scaling) {
  if (scaling.factor == 1.0) return {};
  return {scaling.original_max_positions == 1 ? "linear" : "llama3", scaling.factor, scaling.low_freq_factor,
          scaling.high_freq_factor, scaling.original_max_positions};
}

}  // namespace

ModelConfig model_config_of(const HfModelConfig& hf) {
  ModelConfig c;
  c.family = hf.family == "gpt2" ? Family::gpt2 : Family::llama;
  c.num_layers = hf.num_layers;
  c.hidden_size = hf.hidden_size;
  c.num_heads = hf.num_heads;
  c.num_kv_heads = hf.num_kv_heads;
  c.head_dim = hf.head_dim;
  c.ffn_hidden_size = hf.ffn_hidden_size;
  c.vocab_size = hf.vocab_size;
  c.max_positions = hf.max_positions;
  c.dropout = hf.dropout;
  c.attention_dropout = hf.attention_dropout;
  c.embedding_dropout = hf.embedding_dropout;
  c.position_embedding = positions_of(hf.position_embedding);
  c.norm = hf.norm == "layernorm" ? NormStyle::layernorm : NormStyle::rmsnorm;
  c.norm_eps = hf.norm_eps;
  c.activation = activation_of(hf.activation);
  c.tied_head = hf.tied_head;
  c.qkv_bias = hf.qkv_bias;
  c.linear_bias = hf.linear_bias;
  if (hf.proj_bias != hf.linear_bias) c.proj_bias = hf.proj_bias;
  c.sliding_window = hf.sliding_window;
  c.padding_id = hf.padding_id;
  c.init_std = hf.init_std;
  c.rope_theta = hf.rope_theta;
  c.rope_fraction = hf.rope_fraction;
  c.rope_interleaved = hf.rope_interleaved;
  c.rope_scaling = scaling_of(hf.rope_scaling);
  return resolve(c);
}

HfModelConfig hf_config_of(const ModelConfig& config) {
  HfModelConfig hf;
  hf.family = name_of(config.family);
  hf.num_layers = config.num_layers;
  hf.hidden_size = config.hidden_size;
  hf.num_heads = config.num_heads;
  hf.num_kv_heads = config.num_kv_heads;
  hf.head_dim = config.head_dim;
  hf.ffn_hidden_size = config.ffn_hidden_size;
  hf.vocab_size = config.vocab_size;
  hf.max_positions = config.max_positions;
  hf.norm_eps = config.norm_eps;
  hf.activation = name_of(*config.activation);
  hf.tied_head = *config.tied_head;
  hf.qkv_bias = *config.qkv_bias;
  hf.linear_bias = *config.linear_bias;
  hf.proj_bias = config.proj_bias.value_or(hf.linear_bias);
  hf.sliding_window = config.sliding_window;
  hf.padding_id = config.padding_id;
  hf.init_std = config.init_std;
  hf.position_embedding = name_of(*config.position_embedding);
  hf.norm = name_of(*config.norm);
  if (config.position_embedding == PositionKind::rotary) {
    hf.rope_fraction = config.rope_fraction;
    hf.rope_interleaved = config.rope_interleaved;
    hf.rope_theta = config.rope_theta;
    hf.rope_scaling = hf_scaling_of(config.rope_scaling);
  }
  hf.dropout = config.dropout;
  hf.attention_dropout = config.attention_dropout;
  if (config.embedding_dropout != config.dropout) hf.embedding_dropout = config.embedding_dropout;
  hf.model_type = hf_model_type_of(hf).value_or("");
  return hf;
}

void check_same_model(const ModelConfig& config, const HfModelConfig& hf, const std::string& origin) {
  // How it is trained is the user's to choose; everything else is the model's own.
  auto comparable = [](ModelConfig c) {
    c.dropout = c.attention_dropout = 0.0;
    c.embedding_dropout.reset();
    c.padding_id.reset();
    if (c.proj_bias == c.linear_bias) c.proj_bias.reset();
    c.init_from.reset();
    c.reinitialize = false;
    c.init_std = 0.0;
    return c;
  };
  Config stored, wanted;
  stored.model = comparable(model_config_of(hf));
  wanted.model = comparable(resolve(config));
  const auto a = list_items(stored), b = list_items(wanted);
  std::string differences;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i].value != b[i].value)
      differences += "\n  " + a[i].key + ": " + a[i].value + " there, " + b[i].value + " here";
  }
  TESSERA_ENSURE(CheckpointError, differences.empty(), origin,
                 " holds another model than the configuration:", differences);
}

void load_weights(const HfModel& model, const WeightFit& fit, Engine& engine) {
  on_every_rank(ExecCtx::cpu(1), engine.mesh().world(), [&] {
    for (const StatePiece& piece : engine.params().pieces(PieceSet::held)) {
      const auto kept = fit.kept.find(piece.parameter->name());
      if (kept == fit.kept.end()) continue;
      for (const KeptRows& rows : kept->second) {
        read_rows(model, rows, piece, engine.ctx());
        heartbeat(engine.mesh().world());
      }
    }
  });
  engine.params().gather_weights();
}

WeightFit load_pretrained(const std::filesystem::path& folder, const ModelConfig& config, Engine& engine) {
  std::optional<HfModel> model;
  WeightFit fit;
  on_every_rank(ExecCtx::cpu(1), engine.mesh().world(), [&] {
    model.emplace(open_model(folder));
    if (!config.reinitialize) check_same_model(config, model->config(), folder.string());
    fit = weight_fit(model->config(), hf_config_of(resolve(config)));
    TESSERA_ENSURE(CheckpointError, fit.kept_tensors > 0, "model.reinitialize keeps the tensors of ",
                   folder.string(),
                   " that fit, and none has the name and shape of one of the configuration's model");
  });
  load_weights(*model, fit, engine);
  return fit;
}

void load_parameter(Engine& engine, const std::string& name, const Tensor& whole) {
  engine.params().wait_for_weights();  // the last update may still be sending its part
  engine.ctx().stream->synchronize();
  const ExecCtx host = ExecCtx::cpu(1);
  for (const StatePiece& piece : engine.params().pieces(PieceSet::held)) {
    if (piece.parameter->name() != name) continue;
    TESSERA_CHECK_EQ(whole.shape(), piece.parameter->placement().global(), "the shape of '", name, "'");
    for (const auto& [place, values] : piece.boxes()) {
      Tensor part = whole;
      for (int i = 0; i < place.shape.rank(); ++i) part = part.narrow(i, place.global[i], place.shape[i]);
      const Tensor box = Tensor::empty(host, place.shape, DType::f32);
      ops::copy(host, part, box);
      values.write(engine.ctx(), box.data<float>());
    }
  }
}

ViewSource weights_of(Engine& engine) {
  std::vector<TensorView> views;
  auto memory = std::make_shared<std::vector<Tensor>>();
  for (const Parameter* parameter : engine.params().parameters()) {
    const Tensor& main = memory->emplace_back(engine.params().whole_main(*parameter).to_host());
    views.push_back(
        {parameter->name(), main.dtype(), main.shape(), static_cast<const std::byte*>(main.raw())});
  }
  return ViewSource(std::move(views), std::move(memory));
}

}  // namespace tessera
