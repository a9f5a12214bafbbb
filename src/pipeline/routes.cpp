#include "pipeline/routes.hpp"

#include <limits>
#include <string>

#include "pipeline/label.hpp"
#include "tessera/base/error.hpp"

namespace tessera {
namespace {

using Kind = Action::Kind;

bool has_gradient(DType dtype) { return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16; }

std::string names_of(const std::vector<Port>& ports) {
  std::string names;
  for (const Port& port : ports) names += (names.empty() ? "" : ", ") + port.name;
  return names;
}

}  // namespace

Routes::Routes(const Schedule& schedule)
    : schedule_(schedule),
      places_(2 * static_cast<std::size_t>(schedule.pieces()) *
              static_cast<std::size_t>(schedule.micro_batches)) {
  TESSERA_CHECK(places_.size() * kMostPorts < std::numeric_limits<std::uint32_t>::max(), "a schedule of ",
                schedule.pieces(), " pieces and ", schedule.micro_batches,
                " micro-batches has too many messages to number");
  for (int stage = 0; stage < schedule.stages; ++stage) {
    int place = 0;
    for (const Action& action : schedule.actions[static_cast<std::size_t>(stage)]) {
      TESSERA_CHECK(action.micro_batch >= 0 && action.micro_batch < schedule.micro_batches, "stage ", stage,
                    " has ", label_of(action, schedule.chunks), ", of ", schedule.micro_batches,
                    " micro-batches");
      const int piece = schedule.piece_of(stage, action.chunk);
      if (action.kind != Kind::weight_gradient) {
        places_[index(action.kind != Kind::forward, piece, action.micro_batch)] = place;
      }
      ++place;
    }
  }
}

std::optional<Message> Routes::input_of(int stage, const Action& action) const {
  const int piece = schedule_.piece_of(stage, action.chunk);
  if (action.kind == Kind::weight_gradient) return std::nullopt;
  const bool gradient = action.kind != Kind::forward;
  return message(gradient, gradient ? piece : piece - 1, action.micro_batch);
}

std::optional<Message> Routes::output_of(int stage, const Action& action) const {
  const int piece = schedule_.piece_of(stage, action.chunk);
  if (action.kind == Kind::weight_gradient) return std::nullopt;
  const bool gradient = action.kind != Kind::forward;
  return message(gradient, gradient ? piece - 1 : piece, action.micro_batch);
}

// Activations are made before the boundary and used behind it; gradients the other way round.
std::vector<Port> Routes::made(const StageProgram& program, const Message& message) const {
  const int piece = message.gradient ? message.boundary + 1 : message.boundary;
  return ports(program, piece, !message.gradient, message.micro_batch);
}

std::vector<Port> Routes::used(const StageProgram& program, const Message& message) const {
  const int piece = message.gradient ? message.boundary : message.boundary + 1;
  return ports(program, piece, message.gradient, message.micro_batch);
}

std::vector<Port> Routes::ports(const StageProgram& program, int piece, bool behind, int micro_batch) const {
  const int chunk = schedule_.chunk_of(piece);
  std::vector<Port> ports = behind ? program.outputs(chunk, micro_batch) : program.inputs(chunk, micro_batch);
  const char* const way = behind ? " gives to the next" : " gets from the one before";
  TESSERA_CHECK(!ports.empty(), "piece ", piece, way, " nothing: pieces of a model are connected");
  TESSERA_CHECK(ports.size() <= kMostPorts, "piece ", piece, way, " ", ports.size(), " values (",
                names_of(ports), "); at most ", kMostPorts, " cross a boundary");
  for (const Port& port : ports) {
    TESSERA_CHECK(has_gradient(port.dtype), "piece ", piece, way, " '", port.name, "' of dtype ", port.dtype,
                  ", which has no gradient");
  }
  return ports;
}

std::uint32_t Routes::tag_of(const Message& message, std::size_t port) const {
  return static_cast<std::uint32_t>(port * places_.size() +
                                    index(message.gradient, message.boundary, message.micro_batch));
}

std::size_t Routes::index(bool gradient, int piece, int micro_batch) const {
  const auto row = static_cast<std::size_t>(piece) * static_cast<std::size_t>(schedule_.micro_batches);
  return 2 * (row + static_cast<std::size_t>(micro_batch)) + (gradient ? 1 : 0);
}

std::optional<Message> Routes::message(bool gradient, int boundary, int micro_batch) const {
  if (boundary < 0 || boundary + 1 >= schedule_.pieces()) return std::nullopt;
  const int maker = gradient ? boundary + 1 : boundary, user = gradient ? boundary : boundary + 1;
  return Message{.gradient = gradient,
                 .boundary = boundary,
                 .micro_batch = micro_batch,
                 .from = schedule_.stage_of(maker),
                 .to = schedule_.stage_of(user),
                 .made_at = places_[index(gradient, maker, micro_batch)],
                 .used_at = places_[index(gradient, user, micro_batch)]};
}

}  // namespace tessera
