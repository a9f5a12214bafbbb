#pragma once
/// The messages of a schedule's table: between which passes they go, what they hold, how they are numbered.

#include <optional>
#include <vector>

#include "tessera/pipeline/executor.hpp"

namespace tessera {

/// What passes between piece `boundary` and the next, in one direction, for one micro-batch.
struct Message {
  bool gradient = false;
  int boundary = 0, micro_batch = 0;
  int from = 0, to = 0;          ///< stages
  int made_at = 0, used_at = 0;  ///< places of the two passes in the columns of `from` and `to`
};

class Routes {
 public:
  /// `schedule` is kept by reference. Errors: InvalidArgument for a table that is too large to number, or
  /// whose passes are of no micro-batch.
  explicit Routes(const Schedule& schedule);

  /// What a pass needs and what it makes; nothing where the model begins or ends.
  std::optional<Message> input_of(int stage, const Action& action) const;
  std::optional<Message> output_of(int stage, const Action& action) const;
  /// The values of a message, as the piece that makes it declares them, and the one that uses it. Errors:
  /// InvalidArgument, naming piece and ports, for more than kMostPorts, none, or such as have no gradient.
  std::vector<Port> made(const StageProgram& program, const Message& message) const;
  std::vector<Port> used(const StageProgram& program, const Message& message) const;
  /// Of one value of a message, unique in the table; that of the first value is the message's.
  std::uint32_t tag_of(const Message& message, std::size_t port = 0) const;

 private:
  std::size_t index(bool gradient, int piece, int micro_batch) const;
  std::optional<Message> message(bool gradient, int boundary, int micro_batch) const;
  std::vector<Port> ports(const StageProgram& program, int piece, bool behind, int micro_batch) const;

  const Schedule& schedule_;
  std::vector<int> places_;  // of F and B in their columns, by piece and micro-batch
};

}  // namespace tessera
