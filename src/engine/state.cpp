#include "tessera/engine/state.hpp"

#include <nlohmann/json.hpp>
#include <optional>

#include "engine/ranks.hpp"
#include "tessera/base/config_file.hpp"

namespace tessera {
namespace {

/// What this rank saves, or must be given: main weights, and the optimizer's tensors if it trains.
std::vector<StatePiece> pieces_of(Engine& engine, PieceSet set) {
  std::vector<StatePiece> pieces = engine.params().pieces(set);
  if (engine.options().trainable) {
    const std::vector<StatePiece> more = engine.optimizer().pieces(set);
    pieces.insert(pieces.end(), more.begin(), more.end());
  }
  return pieces;
}

/// fn(box of the whole tensor, its bytes in this process) for each box a piece consists of.
template <typename Fn>
void for_each_box(const StatePiece& piece, Fn&& fn) {
  const Shape strides = piece.parameter->shape().contiguous_strides();
  for (const Placed& box : piece.parameter->placement().boxes(piece.begin, piece.end)) {
    std::int64_t first = 0;
    for (int i = 0; i < strides.rank(); ++i) first += box.local[i] * strides[i];
    const std::int64_t count = box.shape.numel();
    TESSERA_ENSURE(InternalError, first >= piece.begin && first + count <= piece.end, "a box of ",
                   piece.name(), " is not contiguous");
    fn(TensorSlice{box.global, box.shape}, piece.tensor.narrow(0, first - piece.begin, count));
  }
}

std::string describe(const Placement& placement) {
  return placement.is_replicated() ? "replicate" : detail::concat("shard(", placement.dim(), ")");
}

std::vector<CheckpointTensor> tensors_to_save(Engine& engine) {
  std::vector<CheckpointTensor> tensors;
  for (const StatePiece& piece : pieces_of(engine, PieceSet::owned)) {
    for_each_box(piece, [&](const TensorSlice& slice, const Tensor& data) {
      tensors.push_back({.name = piece.name(),
                         .dtype = data.dtype(),
                         .shape = piece.parameter->placement().global(),
                         .slice = slice,
                         .placement = describe(piece.parameter->placement()),
                         .data = static_cast<const std::byte*>(data.raw())});
    });
  }
  return tensors;
}

CheckpointState checkpoint_state(Engine& engine, const RunState& run) {
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
  return state;
}

}  // namespace

std::filesystem::path save_engine(const std::filesystem::path& root, Engine& engine, const RunState& run,
                                  const SaveOptions& options) {
  engine.ctx().stream->synchronize();
  engine.params().wait_for_weights();
  Communicator& world = engine.mesh().world();
  const std::vector<CheckpointTensor> tensors = tensors_to_save(engine);
  std::uint64_t own_bytes = 0, bytes = 0;
  for (const CheckpointTensor& t : tensors)
    own_bytes += static_cast<std::uint64_t>(t.slice.shape.numel()) * size_of(t.dtype);
  for (const std::string& each : gather_texts(engine.ctx(), world, std::to_string(own_bytes)))
    bytes += std::stoull(each);
  std::optional<CheckpointSave> save;  // on rank 0
  const std::string staging = on_first_rank(engine.ctx(), world, [&] {
    save.emplace(root, run.step, bytes, options);
    return save->staging().string();
  });
  std::string record;
  on_every_rank(engine.ctx(), world, [&] {
    record = write_checkpoint_shard(staging, world.rank(), world.size(), tensors, options);
  });
  const std::vector<std::string> records = gather_texts(engine.ctx(), world, record);
  return on_first_rank(engine.ctx(), world,
                       [&] { return save->commit(checkpoint_state(engine, run), records).string(); });
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
  const std::vector<StatePiece> wanted = pieces_of(engine, PieceSet::held);
  std::string problems;
  std::string_view last;  // pieces of one tensor follow each other
  for (const StatePiece& piece : wanted) {
    const std::string name = piece.name();
    const Manifest::Tensor* stored = reader.find(name);
    if (name == last) continue;
    const Shape& shape = piece.parameter->placement().global();
    if (stored == nullptr) {
      problems += "\n  " + name + " is missing";
    } else {
      last = stored->name;
      if (stored->shape != shape || stored->dtype != piece.tensor.dtype()) {
        problems += detail::concat("\n  ", name, " is ", stored->dtype, " ", stored->shape,
                                   ", the model needs ", piece.tensor.dtype(), " ", shape);
      }
    }
  }
  TESSERA_ENSURE(CheckpointError, problems.empty(), reader.dir().string(),
                 " does not fit this model:", problems);
  for (const StatePiece& piece : wanted) {
    for_each_box(piece, [&](const TensorSlice& slice, const Tensor& data) {
      reader.read(piece.name(), slice, {static_cast<std::byte*>(data.raw()), data.nbytes()});
    });
  }
  if (engine.options().trainable) {
    const auto user = nlohmann::json::parse(reader.state().user_json);
    engine.optimizer().set_updates(user.at("optimizer_updates").get<std::int64_t>());
  }
}

}  // namespace tessera
