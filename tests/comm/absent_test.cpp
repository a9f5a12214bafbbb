/// A rank whose peers are not there: the mesh is that of the real one, and nothing waits.

#include <gtest/gtest.h>

#include "tessera/comm/mesh.hpp"
#include "tests/support/ranks.hpp"

namespace tessera {
namespace {

void expect_same(Communicator& a, Communicator& b) {
  EXPECT_EQ(a.rank(), b.rank()) << a.name();
  EXPECT_EQ(a.size(), b.size()) << a.name();
  EXPECT_EQ(a.name(), b.name());
}

TEST(AbsentRanks, TheMeshIsTheRealOne) {
  const MeshShape shape{.tp = 4, .cp = 1, .ep = 1, .dp = 2, .pp = 3};
  test::run_local(shape.world(), {.timeout_s = 60}, [&](std::shared_ptr<Communicator> world) {
    ProcessMesh real(world, shape);
    const auto alone = ProcessMesh::alone(shape, world->rank());
    EXPECT_EQ(alone->shape(), shape);
    EXPECT_EQ(alone->rank(), real.rank());
    for (const Axis axis : {Axis::tp, Axis::cp, Axis::ep, Axis::dp, Axis::pp}) {
      EXPECT_EQ(alone->coordinates().along(axis), real.coordinates().along(axis));
      expect_same((*alone)[axis], real[axis]);
    }
    expect_same(alone->embedding(), real.embedding());
    for (const int copies : {1, 2, 4}) expect_same(alone->tp_block(copies), real.tp_block(copies));
  });
}

TEST(AbsentRanks, NothingWaits) {
  const ExecCtx ctx = ExecCtx::cpu(1);
  const auto group = make_absent_communicator(1, 3, "tp");
  const Tensor x = Tensor::from(ctx, std::vector<float>{1, 2, 3}, {3});
  group->all_reduce(ctx, x).wait(ctx);
  group->send(ctx, x, 0).wait(ctx);
  group->recv(ctx, x, 2).wait(ctx);
  group->barrier(ctx);
  EXPECT_EQ(x.to_vector<float>(), (std::vector<float>{1, 2, 3}));
  const Tensor count = Tensor::from(ctx, std::vector<double>{0}, {1});
  group->all_reduce(ctx, count).wait(ctx);
  EXPECT_EQ(count.to_vector<double>()[0], 2) << "others are counted";
  EXPECT_EQ(group->failure(), "");
  EXPECT_THROW(group->split(0, 0, "tp_block"), InvalidArgument);
}

TEST(AbsentRanks, CountWhatRealOnesCountAndMoveNothing) {
  const auto calls = [](const ExecCtx& ctx, Communicator& group) {
    const Tensor odd = Tensor::empty(ctx, {7}, DType::f32), even = Tensor::empty(ctx, {6}, DType::bf16),
                 third = Tensor::empty(ctx, {2}, DType::bf16), sum = Tensor::empty(ctx, {1}, DType::f64);
    for (const Tensor& t : {odd, even, third, sum}) t.copy_from_host(std::vector<char>(64).data());
    group.all_reduce(ctx, odd).wait(ctx);
    group.all_reduce(ctx, sum).wait(ctx);
    group.reduce_scatter(ctx, even, third).wait(ctx);
    group.all_gather(ctx, third, even).wait(ctx);
    group.broadcast(ctx, odd, 1).wait(ctx);
    group.barrier(ctx);
    return group.stats().bytes_sent;
  };
  test::run_local(3, {.timeout_s = 60}, [&](std::shared_ptr<Communicator> real) {
    const auto absent = make_absent_communicator(real->rank(), 3, "world");
    EXPECT_EQ(calls(ExecCtx::meta(), *absent), calls(ExecCtx::cpu(1), *real));
  });
}

}  // namespace
}  // namespace tessera
