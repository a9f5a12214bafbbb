#include "tessera/engine/state.hpp"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/json_reason.hpp"
#include "checkpoint/checkpoint_dirs.hpp"
#include "engine/ranks.hpp"
#include "engine/saved_parts.hpp"
#include "tessera/base/config_file.hpp"
#include "tessera/comm/bytes.hpp"
#include "tessera/comm/heartbeat.hpp"
#include "tessera/device/flight.hpp"
#include "tessera/engine/moments.hpp"

namespace tessera {

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
