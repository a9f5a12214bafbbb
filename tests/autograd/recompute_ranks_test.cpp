/// Recomputed parts whose inputs are shared out over ranks.

#include "tests/autograd/chain.hpp"
#include "tests/support/device.hpp"
#include "tests/support/memory.hpp"
#include "tests/support/ranks.hpp"

namespace tessera {
namespace {

using test::BlockSizes;
using test::Chain;
using test::expect_same;
using test::Plan;
using test::random_tensor;
using test::Values;
using test::Weights;

TEST(PartitionedRecompute, ChangesNoBit) {
  for (const int size : {2, 3}) {
    for (const DType compute : {DType::f32, DType::bf16, DType::f16}) {
      const BlockSizes sizes{.compute = compute};
      const ExecCtx ctx = test::context(1, 3);
      const Values immediate = Chain(ctx, sizes, 3, {}).run();
      const Values
          deferred =  // a norm's sums have another order on CUDA when its gradients are computed apart
          test::on_cuda() ? Chain(ctx, sizes, 3, {.weights = Weights::deferred}).run() : immediate;
      test::run_on_device(size, [&](const std::shared_ptr<Communicator>& comm) {
        const ExecCtx own = test::context(1, 3);
        for (const Weights weights : {Weights::immediate, Weights::deferred}) {
          const Values& expected = weights == Weights::immediate ? immediate : deferred;
          for (const std::size_t group : {1, 2}) {
            const Plan plan{
                .group = group, .nested = group == 2, .weights = weights, .partition = comm.get()};
            SCOPED_TRACE(::testing::Message() << "rank " << comm->rank());
            expect_same(Chain(own, sizes, 3, plan).run(), expected);
          }
        }
      });
    }
  }
}

TEST(PartitionedRecompute, KeepsEachInputInPart) {
  test::run_on_device(3, [](const std::shared_ptr<Communicator>& comm) {
    const ExecCtx own = test::context(1, 3);
    const auto table = test::make_parameter(own, "table", {7, 4}, 5);
    for (const std::int64_t rows : {1, 2, 8, 1000}) {  // some ranks get none, or one less
      std::vector<std::int32_t> ids;
      for (std::int64_t i = 0; i < rows; ++i) ids.push_back(static_cast<std::int32_t>(i * 5 % 7));
      std::vector<float> grads[2];
      std::size_t held[2];
      for (const bool part : {false, true}) {
        table->clear_grad();
        Tape tape;
        Var y;
        held[part] = test::held_bytes(own, [&] {
          const Var tokens = tape.input(Tensor::from(own, ids, {rows}), false);
          const auto lookup = [&](const std::vector<Var>& in) {
            return std::vector<Var>{embedding(own, in[0], *table, {}, nullptr, {DType::f32})};
          };
          y = recompute(own, {tokens}, {table.get()}, lookup, part ? comm.get() : nullptr)[0];
          return 0;
        });
        tape.backward(own, y, random_tensor(own, {rows, 4}, 6));
        grads[part] = table->grad().to_floats();
      }
      EXPECT_EQ(grads[0], grads[1]);
      if (rows == 1000) {
        EXPECT_EQ(held[0] - held[1],
                  4096u - 1536u);  // 4000 bytes whole, 1336 or 1332 shared, in units of 256
      }
    }
  });
}

}  // namespace
}  // namespace tessera
