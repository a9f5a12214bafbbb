#pragma once
/// Pipeline schedules as tables: which forward and backward passes each stage runs, in which order. Pure
/// functions; the executor walks the table, `tessera plan` prints it.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/config_words.hpp"

namespace tessera {

/// One entry of a stage's list.
struct Action {
  enum class Kind {
    forward,          ///< F
    backward,         ///< B and W at once
    input_gradient,   ///< B of a zero-bubble schedule
    weight_gradient,  ///< W
  };
  Kind kind = Kind::forward;
  int chunk = 0;  ///< of this stage
  int micro_batch = 0;
  friend bool operator==(const Action&, const Action&) = default;
};

/// A model is cut into stages * chunks pieces, run one after the other. Piece 0 holds the embedding, the last
/// one the head.
struct Schedule {
  PipelineSchedule kind = PipelineSchedule::one_f_one_b;
  int stages = 1;
  int chunks = 1;  ///< per stage
  int micro_batches = 1;
  bool forward_only = false;
  std::vector<std::vector<Action>> actions;  ///< per stage

  int pieces() const { return stages * chunks; }
  /// Round robin (interleaved) or folded (zb-v: piece 2p-1-r is chunk 1 of stage r).
  int stage_of(int piece) const;
  int chunk_of(int piece) const;
  int piece_of(int stage, int chunk) const;
};

/// gpipe: all forwards, then all backwards. 1f1b, interleaved: Megatron's orders (warm-up of
/// min(p - r - 1, m); interleaved of min(2 (p - r - 1) + (v - 1) p, v m), micro-batches in groups of p).
/// zb-h1, zb-v: Qi et al., "Zero bubble pipeline parallelism" and "Pipeline parallelism with controllable
/// memory"; every stage holds at most p micro-batches (zb-v: 2p of its half-size chunks) at once, as stage 0
/// does under 1f1b. With one stage every schedule is F B F B ... (W right after B; with several chunks all
/// their F, then all their B). forward_only: evaluation, any number of micro-batches. Errors: ConfigError for
/// impossible numbers (interleaved with one chunk or, in training, with micro_batches not a multiple of
/// stages; zb-v with chunks other than 2; several chunks for a schedule that has one).
Schedule make_schedule(PipelineSchedule kind, int stages, int chunks, int micro_batches,
                       bool forward_only = false);

/// Relative times of one piece's passes, for simulation. backward = input_gradient + weight_gradient.
struct PassTimes {
  double forward = 1, input_gradient = 1, weight_gradient = 1;
  double transfer = 0;  ///< until what this piece made is on another stage; hidden from its own stage
};
struct TimedAction {
  Action action;
  int stage = 0;
  double begin = 0, end = 0;
};
struct Simulation {
  std::vector<TimedAction> actions;  ///< by begin
  double makespan = 0;
  double bubble = 0;  ///< idle share of stages * makespan
  /// Per stage: micro-batch x chunk activations held at once (F to its last B or W; forward_only: during F).
  std::vector<int> most_in_flight;
};
/// Runs the table with every pass as early as its inputs and its stage allow. Errors: InvalidArgument naming
/// the action that can never run (deadlock). `times` per piece, or one for all.
Simulation simulate(const Schedule& schedule, const std::vector<PassTimes>& times);

/// An independent check of a table: every pass once, F before B before W, inputs made before they are used,
/// no deadlock, activations from one stage to another sent and used in one order, gradients likewise. Empty
/// if sound, else one line per fault.
std::vector<std::string> verify(const Schedule& schedule);

/// One line per stage: "F0 F1 B0 F2 B1 ...", chunks as letters after the number when there are several
/// ("F0a").
std::string to_text(const Schedule& schedule);
/// The simulated schedule as a picture in characters, at most `width` columns. Errors: as simulate; a width
/// that leaves nothing for the picture.
std::string to_picture(const Schedule& schedule, const std::vector<PassTimes>& times, int width = 120);
/// The simulated schedule as an SVG file that needs nothing else.
std::string to_svg(const Schedule& schedule, const std::vector<PassTimes>& times);

/// Layers of one piece.
struct PieceLayers {
  std::int64_t first = 0, count = 0;
  bool embedding = false, head = false;
};
/// What the parts of a model cost, forward and backward together, in any one unit.
struct PartCosts {
  double layer = 1, embedding = 0, head = 0;
  std::vector<double> layers = {};  ///< of each, where they are not alike; empty = `layer`
};
/// Cuts a model of so many layers into `pieces`. layout null: the largest cost of a piece is the least
/// possible, then the costs are as even as possible, then earlier pieces get more; every piece gets a layer.
/// layout: comma-separated layers per piece, in the order the model runs: "3,4,4,1"; only the first and the
/// last may have none. Errors: ConfigError (fewer layers than pieces, a layout that does not fit).
std::vector<PieceLayers> cut_layers(std::int64_t layers, int pieces, const std::optional<std::string>& layout,
                                    const PartCosts& costs);
/// The same for the pieces of a schedule. As the slowest stage sets the pace, it evens out the stages first,
/// each with all its chunks (zb-v: embedding and head are on one stage), then the pieces within a stage.
/// Layers that are not alike are cut by pieces alone.
std::vector<PieceLayers> cut_layers(std::int64_t layers, const Schedule& schedule,
                                    const std::optional<std::string>& layout, const PartCosts& costs);

}  // namespace tessera
