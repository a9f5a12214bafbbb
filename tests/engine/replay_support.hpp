#pragma once
/// What a script saw of an engine whose passes may be graphs that are launched again.

#include <gtest/gtest.h>

#include <bit>
#include <functional>
#include <string>
#include <vector>

#include "tessera/engine/engine.hpp"

namespace tessera::test::graph_replay {

/// What a script saw, and what came of its graphs.
struct Seen {
  std::vector<double> numbers;
  std::vector<std::vector<float>> weights;
  StreamGraph::Stats graph;
  std::string because;
};

using Numbers = std::vector<double>;
/// The norm of a skipped step is no number, which equals none.
inline std::vector<std::uint64_t> bits_of(const Numbers& numbers) {
  std::vector<std::uint64_t> bits;
  for (const double number : numbers) bits.push_back(std::bit_cast<std::uint64_t>(number));
  return bits;
}

using Script = std::function<void(Engine&, Numbers&)>;

inline void note(Numbers& numbers, const StepReport& report) {
  numbers.insert(numbers.end(), {report.loss, report.update.grad_norm, report.update.lr,
                                 report.update.loss_scale, report.update.skipped ? 1.0 : 0.0});
  for (const LossTerm& term : report.terms) numbers.push_back(term.mean());
}

inline Seen run_of(Engine& engine, const Script& script) {
  Seen run;
  script(engine, run.numbers);
  for (const Parameter* parameter : engine.params().parameters())
    run.weights.push_back(parameter->value().to_floats());
  run.graph = engine.graph().stats();
  run.because = engine.graph().recorded_because();
  return run;
}

/// The first turn of a kind of passes is plain, the second recorded, and all others repeat it.
inline void expect_replays(const Seen& run, std::uint64_t turns, std::uint64_t kinds = 1) {
  EXPECT_EQ(run.graph.plain, kinds);
  EXPECT_EQ(run.graph.launched, turns - kinds);
  EXPECT_EQ(run.graph.replayed, turns - 2 * kinds) << run.because;
  EXPECT_EQ(run.graph.made, kinds);
}

}  // namespace tessera::test::graph_replay
