#include "tessera/engine/pretrained.hpp"

#include <memory>
#include <optional>

#include "engine/ranks.hpp"
#include "tessera/base/config_file.hpp"
#include "tessera/comm/heartbeat.hpp"
#include "tessera/ops/elementwise.hpp"

namespace tessera {
void check_same_model(const ModelConfig& config, const ModelConfig& stored, const std::string& origin) {
  // A head for classes may be new: what it is then trained on is what the rest of the model has learned.
  const bool new_head = config.num_labels && !stored.num_labels;
  // How it is trained is the user's to choose; everything else is the model's own.
  auto comparable = [new_head](const ModelConfig& model) {
    Settings whole;
    ModelSettings& c = whole.model;
    c = architecture_of(model).model;
    c.dropout = c.attention_dropout = 0.0;
    c.embedding_dropout.reset();
    c.padding_id.reset();
    c.init_std = 0.0;
    if (new_head) {
      c.num_labels.reset();
      c.problem_type.reset();
      c.binary_head.reset();
    }
    return list_items(whole);
  };
  const auto a = comparable(stored), b = comparable(config);
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
  engine.params().weights().gather();
}

WeightFit load_pretrained(const std::filesystem::path& folder, const ModelConfig& config, Engine& engine) {
  std::optional<HfModel> model;
  WeightFit fit;
  on_every_rank(ExecCtx::cpu(1), engine.mesh().world(), [&] {
    model.emplace(open_model(folder));
    if (!config.reinitialize) check_same_model(config, model->config().model, folder.string());
    fit = weight_fit(model->config(), architecture_of(config));
    TESSERA_ENSURE(CheckpointError, fit.kept_tensors > 0, "model.reinitialize keeps the tensors of ",
                   folder.string(),
                   " that fit, and none has the name and shape of one of the configuration's model");
  });
  load_weights(*model, fit, engine);
  return fit;
}

void load_parameter(Engine& engine, const std::string& name, const Tensor& whole) {
  engine.params().weights().wait();  // the last update may still be sending its part
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
    const Tensor& main = memory->emplace_back(engine.params().weights().whole(*parameter).to_host());
    views.push_back(
        {parameter->name(), main.dtype(), main.shape(), static_cast<const std::byte*>(main.raw())});
  }
  return ViewSource(std::move(views), std::move(memory));
}

}  // namespace tessera
