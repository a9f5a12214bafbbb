#pragma once
/// A small model cut over tensor, data and pipeline ranks, gradients that any layout can work out, and a run
/// of some updates on ranks as threads.

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tessera/base/philox.hpp"
#include "tessera/comm/mesh.hpp"
#include "tessera/optim/optimizer.hpp"
#include "tests/support/device.hpp"
#include "tests/support/ranks.hpp"

namespace tessera::test {

constexpr int kKvHeads = 2, kHeadRows = 3, kWidth = 10, kVocabulary = 39;

struct Grid {
  int tp = 1, dp = 1, pp = 1;
};

/// Weights, gradients or state of the whole model by parameter name.
using Whole = std::map<std::string, std::vector<float>>;

struct Declared {
  std::vector<std::unique_ptr<Parameter>> owned;
  std::vector<Parameter*> parameters;

  void add(const std::string& name, Placement placement, Init init, ParameterTraits traits = {}) {
    owned.push_back(std::make_unique<Parameter>(name, std::move(placement), init, traits));
    parameters.push_back(owned.back().get());
  }
  Parameter& operator[](const std::string& name) const {
    for (Parameter* p : parameters) {
      if (p->name() == name) return *p;
    }
    throw std::runtime_error("no parameter " + name);
  }
};

/// Rows of queries, keys and values of tensor rank t: key-value heads are copied where there are fewer of
/// them.
inline Placement qkv_placement(int tp, int t) {
  const int query_rows = 24, q = query_rows / tp;
  std::vector<Segment> segments{{.local = 0, .global = t * q, .count = q}};
  const int copies = tp > kKvHeads ? tp / kKvHeads : 1;
  const int heads = tp > kKvHeads ? 1 : kKvHeads / tp;
  for (int part = 0; part < 2; ++part) {
    const std::int64_t first = query_rows + part * kKvHeads * kHeadRows;
    segments.push_back({.local = q + part * heads * kHeadRows,
                        .global = first + t / copies * heads * kHeadRows,
                        .count = heads * kHeadRows,
                        .copies = copies,
                        .copy = t % copies});
  }
  return Placement::segmented({query_rows + 2 * kKvHeads * kHeadRows, kWidth}, 0, segments);
}

/// Gate and up halves of tensor rank t.
inline Placement gated_placement(int tp, int t) {
  const std::int64_t half = 24, own = half / tp;
  return Placement::segmented({2 * half, kWidth}, 0,
                              {{.local = 0, .global = t * own, .count = own},
                               {.local = own, .global = half + t * own, .count = own}});
}

/// The parameters of one rank: tensor rank t, stage p (pp 1 or 2). The vocabulary does not divide, and its
/// parts take up different numbers of aligned blocks.
inline Declared declare(const Grid& grid, int t, int p) {
  Declared d;
  const bool tied = grid.pp > 1;
  const auto word = [&](bool counted) {
    d.add("word", Placement::split({kVocabulary, kWidth}, 0, t, grid.tp), Init::normal(0.3f),
          {.reads_main = counted, .tied = tied, .counted = counted});
  };
  const ParameterTraits norm{.reads_main = true, .partial_over_tensor = true};
  if (p == 0) {
    word(true);
    d.add("position", Placement::replicated({13, kWidth}), Init::normal(0.3f), norm);
  }
  for (int layer = 0; layer < 2; ++layer) {
    if (grid.pp > 1 && layer != p) continue;
    const std::string at = "layer" + std::to_string(layer) + ".";
    d.add(at + "norm", Placement::replicated({kWidth}), Init::ones(), norm);
    d.add(at + "qkv", qkv_placement(grid.tp, t), Init::normal(0.5f));
    d.add(at + "proj", Placement::split({kWidth, 24}, 1, t, grid.tp), Init::normal(0.5f));
    d.add(at + "proj_bias", Placement::replicated({kWidth}), Init::zeros(), {.partial_over_tensor = true});
    d.add(at + "fc1", gated_placement(grid.tp, t), Init::normal(0.5f));
    d.add(at + "scale", Placement::replicated({5}), Init::ones());  // its gradient is whole on every rank
  }
  if (p == grid.pp - 1) {
    d.add("final_norm", Placement::replicated({kWidth}), Init::ones(), norm);
    d.add("head", Placement::split({kVocabulary, kWidth}, 0, t, grid.tp), Init::normal(0.3f));
    if (tied) word(false);
  }
  return d;
}

/// Where each local element of the parameter lies in the whole one.
inline std::vector<std::int64_t> global_indices(const Parameter& p) {
  std::vector<std::int64_t> indices(static_cast<std::size_t>(p.shape().numel()), -1);
  const auto flat = [](const Shape& shape, std::int64_t row, std::int64_t col) {
    return shape.rank() == 1 ? row : row * shape[1] + col;
  };
  for (const Placed& box : p.placement().boxes()) {
    const std::int64_t cols = box.shape.rank() == 1 ? 1 : box.shape[1];
    for (std::int64_t r = 0; r < box.shape[0]; ++r) {
      for (std::int64_t c = 0; c < cols; ++c) {
        const bool vector = box.shape.rank() == 1;
        const std::int64_t local = flat(p.shape(), box.local[0] + r, vector ? 0 : box.local[1] + c);
        indices[static_cast<std::size_t>(local)] =
            flat(p.placement().global(), box.global[0] + r, vector ? 0 : box.global[1] + c);
      }
    }
  }
  return indices;
}

/// What one rank contributes to one element. Exact values have sums that do not depend on their order.
struct Contributions {
  bool exact = true;
  int step = 0, call = 0;

  float value(const std::string& name, std::int64_t element, int d, int part) const {
    std::uint64_t h = site_of(name);
    for (const std::int64_t x :
         {element, std::int64_t{d}, std::int64_t{part}, std::int64_t{step}, std::int64_t{call}})
      h = (h ^ static_cast<std::uint64_t>(x + 77)) * 0x9E3779B97F4A7C15u, h ^= h >> 29;
    const auto n = static_cast<float>(static_cast<int>(h % 1025) - 512);
    return exact ? n / 64.0f : n / 997.0f;
  }
  /// Of all elements of p on rank (t, d, stage).
  std::vector<float> of(const Parameter& p, int t, int d, int stage) const {
    const auto elements = global_indices(p);
    std::vector<float> values;
    for (std::size_t i = 0; i < elements.size(); ++i) {
      int part = p.traits().partial_over_tensor ? t : p.traits().tied ? stage : 0;
      const std::int64_t inner = p.shape().rank() == 1 ? 1 : p.shape()[1];
      for (const Segment& s : p.placement().segments()) {
        const auto row = static_cast<std::int64_t>(i) / inner;
        if (s.copies > 1 && row >= s.local && row < s.local + s.count) part = s.copy;
      }
      values.push_back(value(p.name(), elements[i], d, part));
    }
    return values;
  }
};

/// The gradient of the whole model: every contribution once, data rank by data rank.
inline Whole whole_gradient(const Grid& grid, const Contributions& contributions) {
  Whole sum;
  for (int d = 0; d < grid.dp; ++d) {
    for (int stage = 0; stage < grid.pp; ++stage) {
      for (int t = 0; t < grid.tp; ++t) {
        const Declared declared = declare(grid, t, stage);
        for (const Parameter* p : declared.parameters) {
          const bool same_on_all = p->placement().is_replicated() && !p->traits().partial_over_tensor;
          if (same_on_all && t > 0) continue;
          auto& whole = sum[p->name()];
          whole.resize(static_cast<std::size_t>(p->placement().global().numel()));
          const auto values = contributions.of(*p, t, d, stage);
          const auto elements = global_indices(*p);
          for (std::size_t i = 0; i < values.size(); ++i)
            whole[static_cast<std::size_t>(elements[i])] += values[i];
        }
      }
    }
  }
  return sum;
}

/// Writes a contribution as a backward would.
inline void write_gradient(Parameter& p, const std::vector<float>& values) {
  const float beta = p.next_beta();
  test::edit(p.grad(), [&](std::vector<float>& grad) {
    for (std::size_t i = 0; i < values.size(); ++i) grad[i] = (beta == 0 ? 0.0f : beta * grad[i]) + values[i];
  });
}

/// The bfloat16 that split main weights have for `main`: ties go away from zero.
inline float rounded_away(float main) {
  bfloat16 model;
  model.bits = static_cast<std::uint16_t>((std::bit_cast<std::uint32_t>(main) + 0x8000u) >> 16);
  return static_cast<float>(model);
}

/// One rank of a running grid.
struct Rank {
  Rank(const std::shared_ptr<Communicator>& world, const Grid& shape, ParamStoreOptions options,
       const OptimizerConfig& config, const ParamGroups& groups = {}, const OffloadConfig& offload = {})
      : grid(shape),
        mesh(world, {.tp = shape.tp, .dp = shape.dp, .pp = shape.pp}),
        at(mesh.coordinates()),
        declared(declare(shape, at.tp, at.pp)),
        split_main(options.split_main) {
    options.groups = {.data = &mesh[Axis::dp],
                      .tensor = &mesh[Axis::tp],
                      .embedding = &mesh.embedding(),
                      .world = &mesh.world(),
                      .tensor_block = [this](int copies) -> Communicator& { return mesh.tp_block(copies); }};
    options.offload = offload;
    store = std::make_unique<ParamStore>(ctx, declared.parameters, options);
    optimizer = std::make_unique<Optimizer>(ctx, *store, config, LossScale{}, groups);
  }
  /// One call in the order of a backward pass, reductions during it if `counted`.
  void call(const Contributions& contributions, double factor = 1.0, bool counted = true) {
    store->gradient().begin_call(counted ? [](const Parameter&) { return 1; }
                                         : std::function<int(const Parameter&)>());
    for (auto it = declared.parameters.rbegin(); it != declared.parameters.rend(); ++it) {
      if (!(*it)->trained()) continue;
      write_gradient(**it, contributions.of(**it, at.tp, at.dp, at.pp));
      store->gradient().ready(**it);
    }
    store->gradient().finish_call(factor);
  }

  Grid grid;
  ExecCtx ctx = ExecCtx::cpu(1, 5);
  ProcessMesh mesh;
  MeshCoordinates at;
  Declared declared;
  bool split_main = false;
  std::unique_ptr<ParamStore> store;
  std::unique_ptr<Optimizer> optimizer;
};

/// Collects tensors of all ranks; what several ranks hold must agree bit for bit.
class Collected {
 public:
  void add(const Parameter& p, const std::string& name, const Tensor& values) {
    const auto elements = global_indices(p);
    const auto found = values.to_floats();
    const std::lock_guard lock(mutex_);
    auto& whole = whole_[name];
    auto& seen = seen_[name];
    whole.resize(static_cast<std::size_t>(p.placement().global().numel()));
    seen.resize(whole.size());
    int differences = 0;
    for (std::size_t i = 0; i < found.size(); ++i) {
      const auto at = static_cast<std::size_t>(elements[i]);
      differences += seen[at] && whole[at] != found[i];
      whole[at] = found[i];
      seen[at] = true;
    }
    EXPECT_EQ(differences, 0) << "ranks disagree on " << name;
  }
  /// Main weights of one rank, and what its kernels read.
  void add_weights(const Rank& rank) {
    const bool split_main = rank.split_main;
    for (const Parameter* p : rank.declared.parameters) {
      const Tensor main = rank.store->weights().whole(*p);
      add(*p, p->name(), main);
      const auto value = p->value().to_floats(), exact = main.to_floats();
      int differences = 0;
      for (std::size_t i = 0; i < exact.size(); ++i) {
        const float expected = visit_float(p->value().dtype(), "a weight", [&](auto tag) {
          return static_cast<float>(decltype(tag)(exact[i]));
        });
        differences +=
            value[i] != (split_main && !p->traits().reads_main ? rounded_away(exact[i]) : expected);
      }
      EXPECT_EQ(differences, 0) << p->name() << " as kernels read it";
    }
  }
  const Whole& whole() const { return whole_; }

 private:
  std::mutex mutex_;
  Whole whole_;
  std::map<std::string, std::vector<bool>> seen_;
};

/// A run on one rank that is given the gradients of `grid`'s ranks as sums.
class Serial {
 public:
  Serial(const Grid& grid, const ParamStoreOptions& options, const OptimizerConfig& config,
         const ParamGroups& groups = {})
      : grid_(grid),
        declared_(declare({}, 0, 0)),
        store_(ctx_, declared_.parameters, options),
        optimizer_(ctx_, store_, config, LossScale{}, groups) {}

  void call(const Contributions& contributions, double factor = 1.0) {
    const Whole gradient = whole_gradient(grid_, contributions);
    store_.gradient().begin_call();
    for (Parameter* p : declared_.parameters) {
      if (p->trained()) write_gradient(*p, gradient.at(p->name()));
    }
    store_.gradient().finish_call(factor);
  }
  StepResult step(double lr = 0.05, double decay = 0.1) { return optimizer_.step(lr, decay); }
  Whole weights() const {
    Whole whole;
    for (const Parameter* p : declared_.parameters)
      whole[p->name()] = store_.weights().main(*p).to_vector<float>();
    return whole;
  }
  Whole gradient() const {
    Whole whole;
    for (const Parameter* p : declared_.parameters)
      whole[p->name()] = store_.gradient().whole(*p).to_vector<float>();
    return whole;
  }

 private:
  Grid grid_;
  ExecCtx ctx_ = ExecCtx::cpu(1, 5);
  Declared declared_;
  ParamStore store_;
  Optimizer optimizer_;
};

/// The largest difference relative to the largest value of each tensor.
inline double largest_difference(const Whole& a, const Whole& b) {
  EXPECT_EQ(a.size(), b.size());
  double worst = 0;
  for (const auto& [name, values] : a) {
    const auto& other = b.at(name);
    EXPECT_EQ(values.size(), other.size()) << name;
    double scale = 0, difference = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      scale = std::max(scale, std::abs(static_cast<double>(other[i])));
      difference = std::max(difference, std::abs(static_cast<double>(values[i]) - other[i]));
    }
    worst = std::max(worst, difference / std::max(scale, 1e-30));
  }
  return worst;
}

}  // namespace tessera::test
