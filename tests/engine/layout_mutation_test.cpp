/// The layout matrix must see mistakes. Three are made on purpose: a collective of a conjugate pair is left
/// out, the sum of a replicated gradient is left out, and samples are numbered per rank instead of globally
/// (dropout).

#include <string_view>

#include "tests/engine/engine_support.hpp"
#include "tests/engine/layout_support.hpp"
#include "tests/support/device.hpp"

namespace tessera::test {
namespace {

/// Passes everything on, except the calls of one group that come from one source file: those do nothing.
class LeavesOut final : public Communicator {
 public:
  LeavesOut(std::shared_ptr<Communicator> inner, std::string group, std::string file)
      : Communicator(inner->rank(), inner->size(), inner->name(), inner->options()),
        inner_(std::move(inner)),
        group_(std::move(group)),
        file_(std::move(file)) {}
  void abort(const std::string& reason) override { inner_->abort(reason); }
  std::string failure() const override { return inner_->failure(); }

 protected:
  Pending start(const ExecCtx& ctx, Request r) override {
    if (name() == group_ && std::string_view(r.where.file_name()).ends_with(file_)) return {};
    switch (r.operation) {
      case Operation::all_reduce:
        return inner_->all_reduce(ctx, r.in, r.op, r.where);
      case Operation::reduce_scatter:
        return inner_->reduce_scatter(ctx, r.in, r.out, r.send_counts, r.op, r.where);
      case Operation::all_gather:
        return inner_->all_gather(ctx, r.in, r.out, r.recv_counts, r.where);
      case Operation::broadcast:
        return inner_->broadcast(ctx, r.in, r.root, r.where);
      case Operation::all_to_all:
        return inner_->all_to_all(ctx, r.in, r.out, r.send_counts, r.recv_counts, r.where);
      case Operation::exchange:
        return inner_->exchange(ctx, r.transfers, r.where);
      case Operation::barrier:
        inner_->barrier(ctx, r.where);
        return {};
      case Operation::split:
        break;
    }
    return {};
  }
  std::shared_ptr<Communicator> do_split(int color, int key, const std::string& name, std::uint64_t,
                                         const Where& where) override {
    auto part = inner_->split(color, key, name, where);
    return part ? std::make_shared<LeavesOut>(std::move(part), group_, file_) : nullptr;
  }

 private:
  std::shared_ptr<Communicator> inner_;
  std::string group_, file_;
};

struct Errors {
  LayoutErrors right, wrong;
};

Config mutation_config() {
  Config config = tiny_config(0.1);
  config.model.num_heads = config.model.num_kv_heads = 4;
  config.model.head_dim = 5;
  config.model.ffn_hidden_size = 32;
  config.training.seq_length = 10;
  config.optimizer.eps = 1e-5;
  return config;
}

Errors try_mutation(const Config& config, int ranks, const std::string& group, const std::string& file,
                    const std::function<void(Batch&)>& spoil = nullptr) {
  std::vector<Batch> batches;
  for (unsigned step = 0; step < 2; ++step) batches.push_back(random_batch(4, 10, step));
  const TrainedRun serial = train_serially(config, batches);
  const WorldMaker wrap = [&](std::shared_ptr<Communicator> world) -> std::shared_ptr<Communicator> {
    if (group.empty()) return world;
    return std::make_shared<LeavesOut>(std::move(world), group, file);
  };
  return {compare_layout(config, ranks, batches, serial),
          compare_layout(config, ranks, batches, serial, wrap, spoil)};
}

TEST(LayoutMutation, AMissingConjugateCollectiveIsSeen) {
  if (on_cuda()) GTEST_SKIP() << "the mistake is planted between ranks as threads, which a GPU goes past";
  Config config = mutation_config();
  config.parallel.tensor = 2;
  const Errors errors = try_mutation(config, 2, "tp", "column_linear.cpp");
  EXPECT_LE(errors.right.gradient, 1e-5) << errors.right.worst_gradient;
  EXPECT_GT(errors.wrong.gradient, 1e-2);
}

TEST(LayoutMutation, AMissingSumOfAReplicatedGradientIsSeen) {
  if (on_cuda()) GTEST_SKIP() << "the mistake is planted between ranks as threads, which a GPU goes past";
  Config config = mutation_config();
  config.parallel.tensor = 2;
  config.parallel.sequence = true;
  const Errors errors = try_mutation(config, 2, "tp", "reduction.cpp");
  EXPECT_LE(errors.right.gradient, 1e-5) << errors.right.worst_gradient;
  EXPECT_GT(errors.wrong.gradient, 1e-2);
  EXPECT_NE(errors.wrong.worst_gradient.find("norm"), std::string::npos) << errors.wrong.worst_gradient;
}

TEST(LayoutMutation, MissingGathersAndSumsOfSharesAreSeen) {
  if (on_cuda()) GTEST_SKIP() << "the mistake is planted between ranks as threads, which a GPU goes past";
  Config config = mutation_config();
  config.parallel.data = 2;
  config.parallel.zero_stage = 3;
  for (const char* group : {"dp", "dp_gather"}) {
    const Errors errors =
        try_mutation(config, 2, group, group == std::string("dp") ? "reduction.cpp" : "weights.cpp");
    EXPECT_LE(errors.right.gradient, 1e-5) << errors.right.worst_gradient;
    EXPECT_GT(errors.wrong.gradient, 1e-2) << group;
  }
}

TEST(LayoutMutation, AWrongDropoutIndexIsSeen) {
  Config config = mutation_config();
  config.parallel.data = 2;
  const Errors errors = try_mutation(
      config, 2, "", "", [](Batch& batch) { batch.sample0 = batch.sample_block = batch.sample_stride = 0; });
  EXPECT_LE(errors.right.gradient, 1e-5) << errors.right.worst_gradient;
  EXPECT_GT(errors.wrong.gradient, 1e-3);
}

}  // namespace
}  // namespace tessera::test
