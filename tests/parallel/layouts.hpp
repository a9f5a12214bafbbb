#pragma once
/// Parallel against serial: the same code run by one rank with whole weights and by several with their parts.

#include <functional>
#include <map>
#include <string>

#include "tessera/parallel/functions.hpp"
#include "tests/support/device.hpp"
#include "tests/support/gradcheck.hpp"
#include "tests/support/ranks.hpp"

namespace tessera::test {

using WeightGradients = Tape::WeightGradients;

/// Calls body(local index, global index) for every element of this rank's part.
template <typename Body>
void for_each_element(const Placement& placement, Body&& body) {
  const Shape local = placement.local().contiguous_strides(),
              global = placement.global().contiguous_strides();
  for (const Placed& box : placement.boxes()) {
    for (std::int64_t i = 0; i < box.shape.numel(); ++i) {
      std::int64_t rest = i, from = 0, to = 0;
      for (int d = box.shape.rank() - 1; d >= 0; --d) {
        const std::int64_t step = rest % box.shape[d];
        rest /= box.shape[d];
        from += (box.local[d] + step) * local[d];
        to += (box.global[d] + step) * global[d];
      }
      body(static_cast<std::size_t>(from), static_cast<std::size_t>(to));
    }
  }
}

/// What a rank found: a tensor, and how it lies in the whole.
struct Found {
  Placement placement;
  std::vector<float> values;
  bool summed = false;  ///< each rank has a part of a sum
};
using Outcome = std::map<std::string, Found>;

/// One rank's side of a test: it takes parts of whole tensors that are the same on every layout.
class Rank {
 public:
  Rank(const TensorParallel& tp, std::uint64_t seed = 3) : tp(tp), ctx(test::context(1, seed)) {}

  TensorParallel tp;
  ExecCtx ctx;
  WeightGradients mode = WeightGradients::immediate;
  DType dtype = DType::f32;
  Outcome outcome;

  Placement whole(const Shape& shape) const { return Placement::replicated(shape); }
  Placement split(const Shape& shape, int dim) const {
    return Placement::split(shape, dim, tp.rank(), tp.size());
  }
  /// Of an activation outside the parallel linears.
  Placement stream(const Shape& shape) const {
    return tp.sharded_sequence() ? split(shape, 0) : whole(shape);
  }
  /// Own parts of the two halves of dimension 0, one after the other.
  Placement halves(const Shape& shape) const {
    const Part part = part_of(shape[0] / 2, tp.rank(), tp.size());
    return Placement::segmented(
        shape, 0,
        {{.local = 0, .global = part.begin, .count = part.count},
         {.local = part.count, .global = shape[0] / 2 + part.begin, .count = part.count}});
  }

  /// Random numbers that depend on their place in the whole tensor only.
  Tensor part(const Placement& placement, unsigned seed, float scale = 1.0f) const {
    return cast(random_part(placement, seed, scale));
  }
  std::unique_ptr<Parameter> parameter(const std::string& name, const Placement& placement, unsigned seed,
                                       bool trained = true) const {
    auto p = std::make_unique<Parameter>(name, placement, Init::zeros());
    const Tensor main = random_part(placement, seed, 0.5f);
    // Whatever is there must not show: the first contribution overwrites.
    p->bind(cast(main), trained ? random_part(placement, seed + 1, 99.0f) : Tensor(), main);
    return p;
  }

  void keep(const std::string& name, const Placement& placement, const Tensor& t, bool summed = false) {
    ASSERT_EQ(t.shape().numel(), placement.local().numel()) << name;
    outcome[name] = {placement, (t.is_contiguous() ? t : ops::contiguous(ctx, t)).to_floats(), summed};
  }
  void keep_gradient(const Parameter& p, bool summed = false) {
    ASSERT_TRUE(p.has_grad()) << p.name();
    keep("gradient of " + p.name(), p.placement(), p.grad(), summed && tp.active());
  }
  void backward(Tape& tape, const Var& root, const Tensor& upstream) const {
    tape.backward(ctx, root, upstream, mode);
    if (mode == WeightGradients::deferred) tape.run_weight_gradients(ctx);
  }

 private:
  Tensor cast(const Tensor& t) const { return dtype == DType::f32 ? t : ops::cast(ctx, t, dtype); }
  Tensor random_part(const Placement& placement, unsigned seed, float scale) const {
    const std::vector<float> all = random_floats(placement.global().numel(), seed, scale);
    std::vector<float> own(static_cast<std::size_t>(placement.local().numel()));
    for_each_element(placement, [&](std::size_t local, std::size_t global) { own[local] = all[global]; });
    return Tensor::from(ctx, own, placement.local());
  }
};

using RankTest = std::function<void(Rank&)>;

inline Outcome run_serial(const RankTest& test, DType dtype = DType::f32) {
  Rank rank({});
  rank.dtype = dtype;
  test(rank);
  return std::move(rank.outcome);
}

struct Layout {
  int size = 1;
  bool sequence = false;
  WeightGradients mode = WeightGradients::immediate;
  int chunks = 1;

  friend std::ostream& operator<<(std::ostream& out, const Layout& layout) {
    return out << "tp " << layout.size << (layout.sequence ? " with sp" : "")
               << (layout.mode == WeightGradients::deferred ? ", deferred" : "") << ", chunks "
               << layout.chunks;
  }
};

inline std::vector<Layout> all_layouts() {
  std::vector<Layout> list;
  for (const int size : {2, 3, 4}) {
    for (const bool sequence : {false, true}) {
      for (const auto mode : {WeightGradients::immediate, WeightGradients::deferred})
        list.push_back({size, sequence, mode});
    }
  }
  return list;
}

inline std::vector<Layout> all_layouts_in_pieces() {
  std::vector<Layout> list;
  for (Layout layout : all_layouts()) {
    for (layout.chunks = 2; layout.chunks <= 3; ++layout.chunks) list.push_back(layout);
  }
  return list;
}

inline std::vector<Outcome> run_parallel(const Layout& layout, const RankTest& test,
                                         DType dtype = DType::f32) {
  std::vector<Outcome> outcomes(static_cast<std::size_t>(layout.size));
  run_on_device(layout.size, [&](const std::shared_ptr<Communicator>& comm) {
    Rank rank({comm.get(), layout.sequence, layout.chunks});
    rank.mode = layout.mode;
    rank.dtype = dtype;
    test(rank);
    outcomes[static_cast<std::size_t>(comm->rank())] = std::move(rank.outcome);
  });
  return outcomes;
}

/// The whole tensors that the ranks' parts make: one, or each rank's where they all hold the whole.
inline std::vector<std::vector<float>> assemble(const std::vector<Outcome>& ranks, const std::string& name) {
  const Found& first = ranks[0].at(name);
  const auto size = static_cast<std::size_t>(first.placement.global().numel());
  std::vector<std::vector<float>> wholes;
  std::vector<double> sum(size);
  std::vector<int> seen(size);
  for (const Outcome& rank : ranks) {
    const Found& found = rank.at(name);
    if (found.placement.is_replicated() && !found.summed) {
      wholes.push_back(found.values);
      continue;
    }
    for_each_element(found.placement, [&](std::size_t local, std::size_t global) {
      sum[global] += static_cast<double>(found.values[local]);
      ++seen[global];
    });
  }
  if (!wholes.empty()) return wholes;
  for (const int times : seen) EXPECT_EQ(times, first.summed ? static_cast<int>(ranks.size()) : 1) << name;
  return {std::vector<float>(sum.begin(), sum.end())};
}

/// Everything the ranks found is what one rank with the whole finds.
inline void expect_serial(const Outcome& serial, const std::vector<Outcome>& ranks, double tolerance) {
  for (const auto& [name, expected] : serial) {
    for (const std::vector<float>& whole : assemble(ranks, name)) {
      if (tolerance == 0.0) {
        EXPECT_EQ(whole, expected.values) << name;
      } else {
        EXPECT_LE(distance(whole, expected.values), tolerance) << name;
      }
    }
  }
}

inline void expect_serial(const std::vector<Layout>& layouts, const RankTest& test, double tolerance = 1e-6) {
  const Outcome serial = run_serial(test);
  ASSERT_FALSE(serial.empty());
  for (const Layout& layout : layouts) {
    SCOPED_TRACE(::testing::Message() << layout);
    expect_serial(serial, run_parallel(layout, test), tolerance);
  }
}

}  // namespace tessera::test
