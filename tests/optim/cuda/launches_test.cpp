/// How many kernels an update takes: counted by the emulator.

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <optional>

#include "tessera/optim/optimizer.hpp"
#include "tests/optim/distributed_support.hpp"
#if __has_include("emulator.hpp")  // only an emulated build has its folder in the include path
#include "emulator.hpp"
#endif

namespace tessera {
namespace {

#if __has_include("emulator.hpp")
/// Kernels of a second update of a model with so many layers, after `calls` calls. Parameters are dealt out
/// to `groups`, the last of which has a rule of its own, if any.
std::uint64_t kernels_of_an_update(int layers, DType compute, OptimizerName name, int groups, int calls,
                                   std::optional<OptimizerName> last = {}) {
  const ExecCtx ctx = ExecCtx::cuda(0, 3);
  std::vector<std::unique_ptr<Parameter>> owned;
  std::vector<Parameter*> parameters;
  const auto add = [&](const std::string& at, Shape shape) {
    owned.push_back(std::make_unique<Parameter>(at, shape, Init::ones()));
    parameters.push_back(owned.back().get());
  };
  for (int i = 0; i < layers; ++i) {
    const std::string at = std::to_string(i);
    add(at + ".norm", {12});
    add(at + ".weight", {12, 31});
    add(at + ".bias", {31});
  }
  ParamGroups of;
  if (groups > 0) {
    of.groups.resize(static_cast<std::size_t>(groups));
    of.groups.back().rule = last;
    std::map<const Parameter*, std::size_t> places;
    for (const Parameter* p : parameters)
      places.try_emplace(p, places.size() % static_cast<std::size_t>(groups));
    of.group_of = [places](const Parameter& p) { return places.at(&p); };
  }
  ParamStore store(ctx, parameters, {.compute = compute, .bucket_elements = 700});
  Optimizer optimizer(ctx, store, {.name = name}, {}, of);
  std::uint64_t before = 0;
  for (int step = 0; step < 2; ++step) {
    for (int call = 0; call < calls; ++call) {
      store.gradient().begin_call();
      store.gradient().finish_call();
    }
    ctx.stream->synchronize();
    before = tessera_emulator::kernels_run();
    optimizer.step(0.1, 0.1);
    store.weights().wait();
    ctx.stream->synchronize();
  }
  return tessera_emulator::kernels_run() - before;
}

TEST(Launches, AnUpdateIsFiveKernelsHoweverManyParametersThereAre) {
  // Squares and their total, what the update decides, the factors of the groups, the update.
  for (const int layers : {1, 11}) {
    for (const DType compute : {DType::f32, DType::bf16}) {
      for (const OptimizerName name : {OptimizerName::adamw, OptimizerName::sgd}) {
        for (const int calls : {1, 2}) {
          EXPECT_EQ(kernels_of_an_update(layers, compute, name, 0, calls), 5u);
          EXPECT_EQ(kernels_of_an_update(layers, compute, name, 32, calls), 5u);
          // Factors of 32 groups are one launch; a second rule works out its own and updates its own.
          EXPECT_EQ(kernels_of_an_update(layers, compute, name, 33, calls), layers == 11 ? 6u : 5u);
          EXPECT_EQ(kernels_of_an_update(layers, compute, name, 3, calls, OptimizerName::adam), 7u);
        }
      }
    }
  }
}
#endif

}  // namespace
}  // namespace tessera
