#include <algorithm>
#include <optional>

#include "pipeline/label.hpp"
#include "tessera/base/error.hpp"
#include "tessera/pipeline/schedule.hpp"

namespace tessera {

namespace {

using Kind = Action::Kind;

class Simulator {
 public:
  Simulator(const Schedule& schedule, const std::vector<PassTimes>& times)
      : schedule_(schedule),
        times_(times),
        passes_(static_cast<std::size_t>(schedule.pieces()) *
                static_cast<std::size_t>(schedule.micro_batches)),
        next_(schedule.actions.size()),
        free_(schedule.actions.size()) {}

  Simulation run() {
    bool moved = true;
    while (moved) {
      moved = false;
      for (int stage = 0; stage < schedule_.stages; ++stage) {
        while (advance(stage)) moved = true;
      }
    }
    check_finished();
    finish();
    return std::move(result_);
  }

 private:
  /// When the passes of one micro-batch through one piece ended.
  struct Ends {
    std::optional<double> forward, backward;
  };

  const PassTimes& times(int piece) const {
    return times_[times_.size() == 1 ? 0 : static_cast<std::size_t>(piece)];
  }
  Ends& ends(int piece, int micro_batch) {
    return passes_[static_cast<std::size_t>(piece) * static_cast<std::size_t>(schedule_.micro_batches) +
                   static_cast<std::size_t>(micro_batch)];
  }
  std::optional<double> arrival(std::optional<double> end, int from, int to) const {
    if (end && schedule_.stage_of(from) != schedule_.stage_of(to)) *end += times(from).transfer;
    return end;
  }

  /// When the inputs of a pass are there; nothing while they have not been made.
  std::optional<double> ready(Kind kind, int piece, int micro_batch) {
    const Ends& own = ends(piece, micro_batch);
    if (kind == Kind::weight_gradient) return own.backward;
    if (kind == Kind::forward) {
      return piece == 0 ? 0.0 : arrival(ends(piece - 1, micro_batch).forward, piece - 1, piece);
    }
    if (piece == schedule_.pieces() - 1) return own.forward;
    const std::optional<double> grad = arrival(ends(piece + 1, micro_batch).backward, piece + 1, piece);
    return own.forward && grad ? std::optional(std::max(*own.forward, *grad)) : std::nullopt;
  }

  double duration(Kind kind, int piece) const {
    const PassTimes& t = times(piece);
    switch (kind) {
      case Kind::forward:
        return t.forward;
      case Kind::backward:
        return t.input_gradient + t.weight_gradient;
      case Kind::input_gradient:
        return t.input_gradient;
      default:
        return t.weight_gradient;
    }
  }

  /// Runs the next pass of `stage` if its inputs exist.
  bool advance(int stage) {
    const auto s = static_cast<std::size_t>(stage);
    if (next_[s] == schedule_.actions[s].size()) return false;
    const Action& action = schedule_.actions[s][next_[s]];
    TESSERA_CHECK(action.micro_batch >= 0 && action.micro_batch < schedule_.micro_batches, "stage ", stage,
                  " has ", label_of(action, schedule_.chunks), ", of ", schedule_.micro_batches,
                  " micro-batches");
    const int piece = schedule_.piece_of(stage, action.chunk);
    const std::optional<double> start = ready(action.kind, piece, action.micro_batch);
    if (!start) return false;
    const double begin = std::max(*start, free_[s]);
    free_[s] = begin + duration(action.kind, piece);
    Ends& own = ends(piece, action.micro_batch);
    if (action.kind == Kind::forward) own.forward = free_[s];
    if (action.kind == Kind::backward || action.kind == Kind::input_gradient) own.backward = free_[s];
    result_.actions.push_back({action, stage, begin, free_[s]});
    ++next_[s];
    return true;
  }

  void check_finished() const {
    std::string waiting;
    for (std::size_t s = 0; s < next_.size(); ++s) {
      const auto& column = schedule_.actions[s];
      if (next_[s] == column.size()) continue;
      waiting += detail::concat(waiting.empty() ? "" : ", ", "stage ", s, " at ",
                                label_of(column[next_[s]], schedule_.chunks), " (pass ", next_[s] + 1, " of ",
                                column.size(), ")");
    }
    TESSERA_CHECK(waiting.empty(), "the schedule cannot be run, these wait for ever: ", waiting);
  }

  void finish() {
    double busy = 0.0;
    for (const TimedAction& timed : result_.actions) {
      result_.makespan = std::max(result_.makespan, timed.end);
      busy += timed.end - timed.begin;
    }
    const double available = result_.makespan * schedule_.stages;
    result_.bubble = available > 0.0 ? std::max(0.0, 1.0 - busy / available) : 0.0;
    std::stable_sort(result_.actions.begin(), result_.actions.end(),
                     [](const TimedAction& a, const TimedAction& b) {
                       return a.begin != b.begin ? a.begin < b.begin : a.stage < b.stage;
                     });
    for (const auto& column : schedule_.actions) result_.most_in_flight.push_back(most_held(column));
  }

  /// F holds an activation until its W, or until its B where that includes W. A forward-only pass holds it
  /// while it runs.
  int most_held(const std::vector<Action>& column) const {
    int held = 0, most = 0;
    for (const Action& action : column) {
      if (action.kind == Kind::forward) {
        most = std::max(most, held + 1);
        if (!schedule_.forward_only) ++held;
      } else if (action.kind != Kind::input_gradient) {
        --held;
      }
    }
    return most;
  }

  const Schedule& schedule_;
  const std::vector<PassTimes>& times_;
  std::vector<Ends> passes_;       // by piece, then micro-batch
  std::vector<std::size_t> next_;  // per stage: the pass to run
  std::vector<double> free_;       // per stage: when it is free
  Simulation result_;
};

}  // namespace

Simulation simulate(const Schedule& schedule, const std::vector<PassTimes>& times) {
  TESSERA_CHECK_EQ(schedule.actions.size(), static_cast<std::size_t>(schedule.stages), "columns for stages.");
  TESSERA_CHECK(times.size() == 1 || times.size() == static_cast<std::size_t>(schedule.pieces()),
                times.size(), " pass times; give one for all or one for each of the ", schedule.pieces(),
                " pieces");
  for (const PassTimes& t : times) {
    TESSERA_CHECK(
        t.forward >= 0.0 && t.input_gradient >= 0.0 && t.weight_gradient >= 0.0 && t.transfer >= 0.0,
        "pass times must not be negative: ", t.forward, ", ", t.input_gradient, ", ", t.weight_gradient, ", ",
        t.transfer);
  }
  return Simulator(schedule, times).run();
}

}  // namespace tessera
