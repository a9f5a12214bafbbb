#include "tessera/engine/state.hpp"

#include <nlohmann/json.hpp>

#include "tessera/base/config_file.hpp"

namespace tessera {
namespace {

struct NamedState {
  std::string name;
  Tensor tensor;
};

/// Everything of an engine that a checkpoint holds: main weights, and the optimizer's tensors if it trains.
std::vector<NamedState> state_of(Engine& engine) {
  std::vector<NamedState> list;
  for (const Parameter* parameter : engine.params().parameters()) {
    list.push_back({"param." + parameter->name(), engine.params().main(*parameter)});
  }
  if (engine.options().trainable) {
    for (NamedTensor& named : engine.optimizer().state()) list.push_back({named.name, named.tensor});
  }
  return list;
}

}  // namespace

std::filesystem::path save_engine(const std::filesystem::path& root, Engine& engine, const RunState& run,
                                  const SaveOptions& options) {
  engine.ctx().stream->synchronize();
  std::vector<CheckpointTensor> tensors;
  for (const NamedState& s : state_of(engine)) {
    tensors.push_back(CheckpointTensor::whole(
        {s.name, s.tensor.dtype(), s.tensor.shape(), static_cast<const std::byte*>(s.tensor.raw())}));
  }
  CheckpointState state;
  state.step = run.step;
  state.consumed_samples = run.consumed_samples;
  state.config_json = nlohmann::json{{"yaml", to_yaml(run.config)}}.dump();
  state.rng_json = nlohmann::json{{"seed", engine.ctx().seed}, {"step", run.step}}.dump();
  state.data_json = nlohmann::json{{"consumed_samples", run.consumed_samples}}.dump();
  state.user_json =
      nlohmann::json{{"tokens", run.tokens},
                     {"skipped", run.skipped},
                     {"optimizer_updates", engine.options().trainable ? engine.optimizer().updates() : 0}}
          .dump();
  return save_checkpoint(root, state, tensors, options);
}

RunState read_run_state(const CheckpointReader& reader) {
  const CheckpointState& state = reader.state();
  try {
    const auto user = nlohmann::json::parse(state.user_json);
    const auto config = nlohmann::json::parse(state.config_json);
    return {.step = state.step,
            .consumed_samples = state.consumed_samples,
            .tokens = user.at("tokens").get<std::int64_t>(),
            .skipped = user.at("skipped").get<std::int64_t>(),
            .config = parse_config(config.at("yaml").get<std::string>(),
                                   (reader.dir() / "manifest.json").string())};
  } catch (const nlohmann::json::exception& error) {
    throw CheckpointError(
        detail::concat(reader.dir().string(), " was not saved by a training run: ", error.what()));
  }
}

void load_engine(const CheckpointReader& reader, Engine& engine) {
  const std::vector<NamedState> wanted = state_of(engine);
  std::string problems;
  for (const NamedState& s : wanted) {
    const Manifest::Tensor* stored = reader.find(s.name);
    if (stored == nullptr) {
      problems += "\n  " + s.name + " is missing";
    } else if (stored->shape != s.tensor.shape() || stored->dtype != s.tensor.dtype()) {
      problems += detail::concat("\n  ", s.name, " is ", stored->dtype, " ", stored->shape,
                                 ", the model needs ", s.tensor.dtype(), " ", s.tensor.shape());
    }
  }
  TESSERA_ENSURE(CheckpointError, problems.empty(), reader.dir().string(),
                 " does not fit this model:", problems);
  for (const NamedState& s : wanted) {
    reader.read(s.name, {static_cast<std::byte*>(s.tensor.raw()), s.tensor.nbytes()});
  }
  engine.params().refresh_model_copy();
  if (engine.options().trainable) {
    const auto user = nlohmann::json::parse(reader.state().user_json);
    engine.optimizer().set_updates(user.at("optimizer_updates").get<std::int64_t>());
  }
}

}  // namespace tessera
