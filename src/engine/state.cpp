#include "tessera/engine/state.hpp"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/json_reason.hpp"
#include "checkpoint/checkpoint_dirs.hpp"
#include "engine/ranks.hpp"
#include "tessera/base/config_file.hpp"
#include "tessera/comm/bytes.hpp"
#include "tessera/comm/heartbeat.hpp"
#include "tessera/device/flight.hpp"
#include "tessera/engine/moments.hpp"
#include "tessera/ops/elementwise.hpp"

namespace tessera {
namespace {

/// The optimizer's tensors, if it trains.
std::vector<StatePiece> optimizer_pieces(Engine& engine, PieceSet set, const StateParts& parts) {
  if (!engine.options().trainable || !parts.optimizer) return {};
  return engine.optimizer().pieces(set);
}

std::string describe(const Placement& placement) {
  return placement.is_replicated() ? "replicate" : detail::concat("shard(", placement.dim(), ")");
}

/// Appends boxes that are read from the device one by one, times `factor`.
void add_boxes(std::vector<CheckpointTensor>& shard, Engine& engine, const StatePiece& piece,
               double factor = 1) {
  for (const auto& [place, values] : piece.boxes()) {
    shard.push_back({.name = piece.name(),
                     .dtype = DType::f32,
                     .shape = piece.parameter->placement().global(),
                     .slice = {place.global, place.shape},
                     .placement = describe(piece.parameter->placement()),
                     .read = [&world = engine.mesh().world(), ctx = engine.ctx(), values = values, factor] {
                       heartbeat(world);
                       Tensor box = values.read(ctx);
                       if (factor != 1) {
                         box = Tensor::empty(ctx, box.shape(), DType::f32);
                         ops::axpby(ctx, static_cast<float>(factor), values.values, 0.0f, box);
                       }
                       const auto host = std::make_shared<Tensor>(box.to_host());
                       return std::shared_ptr<const std::byte>(host, static_cast<std::byte*>(host->raw()));
                     }});
  }
}

/// Pieces of the accumulated gradient, of parameters that have one.
std::vector<StatePiece> gradient_pieces(const ParamStore& store, PieceSet set) {
  std::vector<StatePiece> pieces = store.gradient_pieces(set);
  std::erase_if(pieces, [&](const StatePiece& piece) {
    return !store.gradient().trained()[store.layout().index_of(*piece.parameter)];
  });
  return pieces;
}

bool has_accumulated(Engine& engine, const StateParts& parts) {
  return engine.options().trainable && parts.optimizer && engine.params().gradient().finished_calls() > 0;
}

/// A file of this rank.
struct Shard {
  std::string file;
  std::vector<CheckpointTensor> tensors;
};

/// What this rank saves: its main weights, and what belongs to the optimizer. Data ranks share the work, so
/// the weights are in a file of each where there are several.
std::vector<Shard> shards_of(Engine& engine, const StateParts& parts) {
  const MeshCoordinates& at = engine.mesh().coordinates();
  const std::string stage = detail::concat("tp_", at.tp, "_pp_", at.pp), data = detail::concat("_dp_", at.dp);
  Shard model{
      .file = detail::concat("model_", stage, engine.mesh().shape().dp > 1 ? data : "", ".safetensors"),
      .tensors = {}};
  for (const StatePiece& piece : engine.params().pieces(PieceSet::owned))
    add_boxes(model.tensors, engine, piece);
  Shard optimizer{.file = detail::concat("optimizer_", stage, data, ".safetensors"), .tensors = {}};
  for (const StatePiece& piece : optimizer_pieces(engine, PieceSet::owned, parts))
    add_boxes(optimizer.tensors, engine, piece);
  if (has_accumulated(engine, parts)) {
    for (const StatePiece& piece : gradient_pieces(engine.params(), PieceSet::owned))
      add_boxes(optimizer.tensors, engine, piece, engine.params().gradient().scale());
  }
  return {std::move(model), std::move(optimizer)};
}

std::uint64_t bytes_of(const std::vector<Shard>& shards) {
  std::uint64_t bytes = 0;
  for (const Shard& shard : shards) {
    for (const CheckpointTensor& t : shard.tensors)
      bytes += static_cast<std::uint64_t>(t.slice.shape.numel()) * size_of(t.dtype);
  }
  return bytes;
}

/// Writes those that hold something, each rank its own at the same time. Returns, on every rank, the records
/// of all. Collective.
std::vector<std::string> write_shards(Communicator& world, const std::string& staging,
                                      const std::vector<Shard>& shards, const SaveOptions& options) {
  const ExecCtx host = ExecCtx::cpu(1);
  std::vector<std::string> records;
  for (const Shard& shard : shards) {
    std::string own;
    on_every_rank(host, world, [&] {
      if (!shard.tensors.empty()) own = write_checkpoint_shard(staging, shard.file, shard.tensors, options);
    });
    for (std::string& each : all_gather_bytes(world, own)) {
      if (!each.empty()) records.push_back(std::move(each));
    }
  }
  return records;
}

/// Updates of parameters that have not had all of them, on every rank. Collective.
nlohmann::json fewer_updates(Engine& engine) {
  nlohmann::json fewer = nlohmann::json::object();
  if (!engine.options().trainable) return fewer;
  for (const auto& [name, count] : update_counts(engine)) {
    if (count != engine.optimizer().updates()) fewer[name] = count;
  }
  return fewer;
}

/// The optimizer's part of the run's state.
nlohmann::json update_state_json(const UpdateState& state) {
  return {{"optimizer_updates", state.updates},
          {"loss_scale", state.loss_scale},
          {"loss_scale_good_steps", state.good_steps},
          {"loss_scale_hysteresis", state.hysteresis}};
}

CheckpointState checkpoint_state(Engine& engine, const RunState& run, const StateParts& parts,
                                 const nlohmann::json& fewer) {
  CheckpointState state;
  state.step = run.step;
  state.consumed_samples = run.consumed_samples;
  state.config_json = nlohmann::json{{"yaml", to_yaml(run.config)}}.dump();
  state.rng_json = nlohmann::json{{"seed", engine.progress().seed}, {"step", run.step}}.dump();
  state.data_json = nlohmann::json{{"consumed_samples", run.consumed_samples}}.dump();
  nlohmann::json user =
      update_state_json(engine.options().trainable ? engine.optimizer().update_state() : UpdateState{});
  user["tokens"] = run.tokens;
  user["skipped"] = run.skipped;
  user["fewer_updates"] = fewer;
  if (run.tokenizer) user["tokenizer"] = nlohmann::json::parse(to_json(*run.tokenizer));
  if (has_accumulated(engine, parts))
    user["accumulated"] = {{"calls", engine.params().gradient().finished_calls()},
                           {"samples", engine.progress().samples}};
  state.user_json = user.dump();
  state.run = run.run;
  return state;
}

}  // namespace

std::filesystem::path save_engine(const std::filesystem::path& root, Engine& engine, const RunState& run,
                                  const SaveOptions& given, const StateParts& parts) {
  const FlightCall open(engine.ctx().stream->flight(), "save_engine()");
  engine.params().weights().wait();
  engine.ctx().stream->synchronize();
  const ExecCtx host = ExecCtx::cpu(1);
  Communicator& world = engine.mesh().world();
  SaveOptions options = given;
  options.on_phase = [&](SavePhase phase) {
    heartbeat(world);
    if (given.on_phase) given.on_phase(phase);
  };
  const std::vector<Shard> shards = shards_of(engine, parts);
  std::uint64_t bytes = 0;
  for (const std::string& each : all_gather_bytes(world, std::to_string(bytes_of(shards))))
    bytes += std::stoull(each);
  std::optional<CheckpointSave> save;  // on rank 0
  const std::string staging = on_first_rank(host, world, [&] {
    save.emplace(root, run.step, bytes, options);
    return save->staging().string();
  });
  const std::vector<std::string> records = write_shards(world, staging, shards, options);
  const nlohmann::json fewer = fewer_updates(engine);
  return on_first_rank(host, world, [&] {
    return save->commit(checkpoint_state(engine, run, parts, fewer), records).string();
  });
}

std::vector<std::string> verify_together(const std::filesystem::path& dir, Communicator& world) {
  constexpr std::size_t kMostOfARank = 20;
  nlohmann::json own = nlohmann::json::array();
  try {
    const CheckpointReader reader(dir, heartbeat_of(world));
    own = reader.verify(world.rank(), world.size());
    const auto step = checkpoint_detail::step_of(dir.filename().string());
    if (step && *step != reader.state().step)
      own.push_back(detail::concat(dir.string(), ": its manifest says step ", reader.state().step));
  } catch (const Error& error) {
    own.push_back(error.what());
  }
  if (own.size() > kMostOfARank) {
    const std::string more = detail::concat("... and ", own.size() - kMostOfARank, " more problems");
    own.erase(own.begin() + kMostOfARank, own.end());
    own.push_back(more);
  }
  std::vector<std::string> problems;
  const auto all =
      all_gather_bytes(world, own.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    for (const std::string line : nlohmann::json::parse(all[rank])) {
      if (rank == 0)
        problems.push_back(line);
      else if (std::find(problems.begin(), problems.end(), line) == problems.end())
        problems.push_back(detail::concat(line, " (found by rank ", rank, ")"));
    }
  }
  return problems;
}

RunState read_run_state(const CheckpointReader& reader) {
  const CheckpointState& state = reader.state();
  try {
    const auto user = nlohmann::json::parse(state.user_json);
    const auto config = nlohmann::json::parse(state.config_json);
    const auto rng = nlohmann::json::parse(state.rng_json);
    const std::string place = (reader.dir() / "manifest.json").string();
    std::optional<TokenizerRecord> tokenizer;
    if (user.contains("tokenizer"))
      tokenizer = tokenizer_record_from_json(user.at("tokenizer").dump(), place);
    return {
        .step = state.step,
        .consumed_samples = state.consumed_samples,
        .tokens = whole_number<std::int64_t>(user.at("tokens")),
        .skipped = whole_number<std::int64_t>(user.at("skipped")),
        .config = parse_config(config.at("yaml").get<std::string>(), place),
        .run = state.run,
        .tokenizer = std::move(tokenizer),
        .seed = rng.is_object() ? std::optional(whole_number<std::uint64_t>(rng.at("seed"))) : std::nullopt};
  } catch (const nlohmann::json::exception& error) {
    throw CheckpointError(
        detail::concat(reader.dir().string(), " was not saved by a training run: ", reason_of(error)));
  }
}

namespace {

void read_pieces(const CheckpointReader& reader, Engine& engine, const std::vector<StatePiece>& pieces) {
  std::vector<float> box;
  for (const StatePiece& piece : pieces) {
    for (const auto& [place, values] : piece.boxes()) {
      box.resize(static_cast<std::size_t>(values.numel()));
      reader.read(piece.name(), {place.global, place.shape}, std::as_writable_bytes(std::span(box)));
      values.write(engine.ctx(), box.data());
      heartbeat(engine.mesh().world());
    }
  }
}

void load_update_state(const nlohmann::json& user, Optimizer& optimizer) {
  UpdateState state = optimizer.update_state();
  state.updates = whole_number<std::int64_t>(user.at("optimizer_updates"));
  state.loss_scale = user.value("loss_scale", state.loss_scale);
  state.good_steps = whole_number_or(user, "loss_scale_good_steps", state.good_steps);
  state.hysteresis = whole_number_or(user, "loss_scale_hysteresis", state.hysteresis);
  optimizer.set_update_state(state);
  if (!user.contains("fewer_updates")) return;  // of a version in which what is trained never changed
  std::map<std::string, std::int64_t> fewer;
  for (const auto& [name, count] : user.at("fewer_updates").items())
    fewer[name] = whole_number<std::int64_t>(count);
  optimizer.set_updates_of([&](const Parameter& parameter) {
    const auto found = fewer.find(parameter.name());
    return found == fewer.end() ? state.updates : found->second;
  });
}

/// The gradient of the calls since the last update, if the state was saved between two of them.
void load_accumulated(const CheckpointReader& reader, const nlohmann::json& user, Engine& engine) {
  if (!user.contains("accumulated")) return;
  ParamStore& store = engine.params();
  const nlohmann::json& accumulated = user.at("accumulated");
  store.gradient().restore(whole_number<int>(accumulated.at("calls")), [&](const Parameter& parameter) {
    return reader.find("grad." + parameter.name()) != nullptr;
  });
  engine.progress().samples = whole_number<std::int64_t>(accumulated.at("samples"));
  read_pieces(reader, engine, gradient_pieces(store, PieceSet::held));
}

/// Errors: CheckpointError listing what of `wanted` the checkpoint does not have.
void check_pieces(const CheckpointReader& reader, const std::vector<StatePiece>& wanted) {
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
      if (stored->shape != shape || stored->dtype != DType::f32) {
        problems += detail::concat("\n  ", name, " is ", stored->dtype, " ", stored->shape,
                                   ", the model needs ", DType::f32, " ", shape);
      }
    }
  }
  TESSERA_ENSURE(CheckpointError, problems.empty(), reader.dir().string(),
                 " does not fit this model:", problems);
}

/// What reading all of `wanted` meets; "" if it is sound.
std::string damage_of(const CheckpointReader& reader, const std::vector<StatePiece>& wanted,
                      Communicator& world) {
  std::vector<std::byte> bytes;
  try {
    for (const StatePiece& piece : wanted) {
      for (const auto& [place, values] : piece.boxes()) {
        bytes.resize(static_cast<std::size_t>(values.numel()) * sizeof(float));
        const TensorSlice box{place.global, place.shape};
        reader.read(piece.name(), box, bytes);
        const std::string gradient = "grad." + piece.parameter->name();
        if (piece.kind == "param" && reader.find(gradient)) reader.read(gradient, box, bytes);
        heartbeat(world);
      }
    }
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

std::string check_engine(const CheckpointReader& reader, Engine& engine, const StateParts& parts) {
  std::vector<StatePiece> wanted = engine.params().pieces(PieceSet::held);
  const std::vector<StatePiece> more = optimizer_pieces(engine, PieceSet::held, parts);
  wanted.insert(wanted.end(), more.begin(), more.end());
  Communicator& world = engine.mesh().world();
  on_every_rank(ExecCtx::cpu(1), world, [&] {
    check_pieces(reader, wanted);
    read_run_state(reader);
  });
  for (const std::string& damage : all_gather_bytes(world, damage_of(reader, wanted, world))) {
    if (!damage.empty()) return damage;
  }
  return "";
}

void load_engine(const CheckpointReader& reader, Engine& engine, const StateParts& parts) {
  const FlightCall open(engine.ctx().stream->flight(), "load_engine()");
  const ExecCtx host = ExecCtx::cpu(1);
  Communicator& world = engine.mesh().world();
  std::vector<StatePiece> wanted = engine.params().pieces(PieceSet::held);
  const std::vector<StatePiece> more = optimizer_pieces(engine, PieceSet::held, parts);
  wanted.insert(wanted.end(), more.begin(), more.end());
  on_every_rank(host, world, [&] { check_pieces(reader, wanted); });
  if (engine.options().trainable) engine.discard();
  on_every_rank(host, world, [&] {
    read_pieces(reader, engine, wanted);
    if (!engine.options().trainable || !parts.optimizer) return;
    const auto user = nlohmann::json::parse(reader.state().user_json);
    load_update_state(user, engine.optimizer());
    load_accumulated(reader, user, engine);
  });
  engine.params().weights().gather();
}

RunState resume_engine(const std::filesystem::path& dir, Engine& engine, const StateParts& parts) {
  std::optional<CheckpointReader> reader;
  RunState run;
  on_every_rank(ExecCtx::cpu(1), engine.mesh().world(), [&] {
    reader.emplace(dir, heartbeat_of(engine.mesh().world()));
    run = read_run_state(*reader);
  });
  load_engine(*reader, engine, parts);
  engine.progress().steps = run.step;
  engine.progress().skipped = run.skipped;
  if (run.seed) engine.progress().seed = *run.seed;
  return run;
}

}  // namespace tessera
