/// Several values over one boundary: a chain in whole numbers whose first half makes a memory that every
/// piece of the second half reads and passes on.

#include <gtest/gtest.h>

#include <numeric>

#include "chain_program.hpp"
#include "support.hpp"
#include "tests/support/ranks.hpp"

namespace tessera::test {
namespace {

/// Pieces before `join` are those of Chain, over one row more. Piece `join` keeps what they made as the
/// memory and begins a stream of its own; it and all behind it compute y = a x + b + i + the sum of the
/// memory.
struct Joined {
  int pieces = 2, join = 1, micro_batches = 1;

  explicit Joined(const Schedule& schedule)
      : pieces(schedule.pieces()), join((schedule.pieces() + 1) / 2), micro_batches(schedule.micro_batches) {}
  static Shape stream(int micro_batch) { return Chain::shape(micro_batch); }
  static Shape memory(int micro_batch) { return {Chain::shape(micro_batch)[0] + 1, 2}; }
  Shape shape(int piece, int micro_batch) const {
    return piece < join ? memory(micro_batch) : stream(micro_batch);
  }
  /// What crosses the boundary behind `piece`.
  std::vector<Port> behind(int piece, int micro_batch) const {
    std::vector<Port> ports{{shape(piece, micro_batch), DType::f32, "x"}};
    if (piece >= join) ports.push_back({memory(micro_batch), DType::f32, "memory"});
    return ports;
  }
};

using Values = std::vector<double>;

double total(const Values& values) { return std::accumulate(values.begin(), values.end(), 0.0); }

void add_serially(const Joined& model, int i, bool forward_only, ChainResult& result) {
  const auto begin = [&](const Shape& shape) {
    Values x(static_cast<std::size_t>(shape.numel()));
    for (std::size_t j = 0; j < x.size(); ++j) x[j] = Chain::input(i, static_cast<std::int64_t>(j));
    return x;
  };
  std::vector<Values> xs;
  Values x = begin(Joined::memory(i)), memory;
  for (int k = 0; k < model.pieces; ++k) {
    if (k == model.join) memory = std::exchange(x, begin(Joined::stream(i)));
    xs.push_back(x);
    for (double& v : x) v = Chain::a(k) * v + Chain::b(k) + i + total(memory);
  }
  Values grad(x.size());
  for (std::size_t j = 0; j < x.size(); ++j) {
    grad[j] = Chain::weight(i, static_cast<std::int64_t>(j));
    result.loss += grad[j] * x[j];
  }
  double of_memory = 0;
  for (int k = model.pieces - 1; k >= 0 && !forward_only; --k) {
    if (k == model.join - 1) grad.assign(memory.size(), of_memory);
    auto& [a, b] = result.gradients[k];
    const Values& in = xs[static_cast<std::size_t>(k)];
    for (std::size_t j = 0; j < in.size(); ++j) a += grad[j] * in[j];
    b += total(grad);
    if (k >= model.join) of_memory += total(grad);
    for (double& g : grad) g *= Chain::a(k);
  }
}

class JoinedProgram final : public StageProgram {
 public:
  JoinedProgram(const ExecCtx& ctx, const Schedule& schedule, int stage)
      : ctx_(ctx), schedule_(schedule), model_(schedule), stage_(stage) {}

  std::vector<Tensor> forward(int chunk, int i, std::vector<Tensor> inputs) override {
    const int piece = piece_of(chunk);
    Tensor x = piece == 0 ? make(Joined::memory(i), i, &Chain::input) : inputs[0];
    Tensor memory = piece > model_.join ? inputs[1] : Tensor();
    if (passed_on_.contains({piece - 1, i})) {
      EXPECT_EQ(passed_on_[(std::pair{piece - 1, i})], memory.raw()) << "handed over, not copied";
    }
    if (piece == model_.join) memory = std::exchange(x, make(Joined::stream(i), i, &Chain::input));
    if (!schedule_.forward_only) kept_[{chunk, i}] = x;
    const Tensor y = map(x, Chain::a(piece), Chain::b(piece) + static_cast<float>(i + sum(memory)));
    if (piece + 1 == model_.pieces) {
      for (std::int64_t j = 0; j < y.numel(); ++j) result.loss += Chain::weight(i, j) * y.data<float>()[j];
      return {};
    }
    if (!memory) return {y};
    passed_on_[{piece, i}] = memory.raw();
    return {y, memory};
  }

  std::vector<Tensor> backward(int chunk, int i, std::vector<Tensor> grads, bool weights) override {
    const int piece = piece_of(chunk);
    const Tensor grad = grads.empty() ? make(Joined::stream(i), i, &Chain::weight) : grads[0];
    Tensor of_memory = grads.size() > 1 ? grads[1] : Tensor();
    if (piece >= model_.join) {
      if (!of_memory) of_memory = map(make(Joined::memory(i), i, &Chain::input), 0, 0);
      // In place: what the executor gives belongs to the program.
      for (std::int64_t j = 0; j < of_memory.numel(); ++j) of_memory.data<float>()[j] += sum(grad);
    }
    grads_[{chunk, i}] = grad;
    if (weights) weight_gradient(chunk, i);
    if (piece == 0) return {};
    if (piece == model_.join) return {of_memory};
    std::vector<Tensor> result{map(grad, Chain::a(piece), 0)};
    if (of_memory) result.push_back(of_memory);
    return result;
  }

  void weight_gradient(int chunk, int i) override {
    const Tensor x = kept_.at({chunk, i}), grad = grads_.at({chunk, i});
    auto& [a, b] = result.gradients[piece_of(chunk)];
    for (std::int64_t j = 0; j < x.numel(); ++j) {
      a += static_cast<double>(grad.data<float>()[j]) * x.data<float>()[j];
      b += grad.data<float>()[j];
    }
  }

  std::vector<Port> inputs(int chunk, int i) const override { return model_.behind(piece_of(chunk) - 1, i); }
  std::vector<Port> outputs(int chunk, int i) const override { return model_.behind(piece_of(chunk), i); }

  ChainResult result;

 private:
  int piece_of(int chunk) const { return schedule_.piece_of(stage_, chunk); }
  Tensor make(const Shape& shape, int i, float (*value)(int, std::int64_t)) const {
    Tensor t = Tensor::empty(ctx_, shape, DType::f32);
    for (std::int64_t j = 0; j < t.numel(); ++j) t.data<float>()[j] = value(i, j);
    return t;
  }
  Tensor map(const Tensor& x, float factor, float offset) const {
    Tensor y = Tensor::empty(ctx_, x.shape(), DType::f32);
    for (std::int64_t j = 0; j < x.numel(); ++j) y.data<float>()[j] = factor * x.data<float>()[j] + offset;
    return y;
  }
  static float sum(const Tensor& x) {
    return x ? std::accumulate(x.data<float>(), x.data<float>() + x.numel(), 0.0f) : 0.0f;
  }

  ExecCtx ctx_;
  const Schedule& schedule_;
  Joined model_;
  int stage_;
  std::map<std::pair<int, int>, Tensor> kept_, grads_;    // by chunk and micro-batch
  std::map<std::pair<int, int>, const void*> passed_on_;  // memories, by piece and micro-batch
};

/// Bytes that a stage sends: every port of every boundary to another stage, and of its gradients.
std::uint64_t bytes_of(const Schedule& schedule, int stage) {
  const Joined model(schedule);
  std::int64_t bytes = 0;
  for (int boundary = 0; boundary + 1 < model.pieces; ++boundary) {
    const int before = schedule.stage_of(boundary), behind = schedule.stage_of(boundary + 1);
    if (before == behind) continue;
    for (int i = 0; i < model.micro_batches; ++i)
      for (const Port& port : model.behind(boundary, i))
        bytes += (before == stage ? port.bytes() : 0) +
                 (behind == stage && !schedule.forward_only ? port.bytes() : 0);
  }
  return static_cast<std::uint64_t>(bytes);
}

TEST(Ports, EveryScheduleCarriesTwoValuesAndTheirGradients) {
  for_all_schedules(3, 2, 6, [](const Schedule& schedule) {
    if (schedule.pieces() < 2) return;
    const Joined model(schedule);
    ChainResult expected, sum;
    for (int i = 0; i < model.micro_batches; ++i) add_serially(model, i, schedule.forward_only, expected);
    std::vector<ChainResult> results(static_cast<std::size_t>(schedule.stages));
    run_local(schedule.stages, [&](const std::shared_ptr<Communicator>& comm) {
      const ExecCtx ctx = ExecCtx::cpu(1, 7);
      JoinedProgram program(ctx, schedule, comm->rank());
      PipelineExecutor(ctx, *comm).run(schedule, program);
      results[static_cast<std::size_t>(comm->rank())] = program.result;
      EXPECT_EQ(comm->stats().bytes_sent, bytes_of(schedule, comm->rank())) << describe(schedule);
    });
    for (const ChainResult& result : results) {
      sum.loss += result.loss;
      sum.gradients.insert(result.gradients.begin(), result.gradients.end());
    }
    EXPECT_EQ(sum, expected) << describe(schedule);
  });
}

/// Declares whatever a test gives it.
class DeclaringProgram final : public ChainProgram {
 public:
  DeclaringProgram(const ExecCtx& ctx, const Schedule& schedule, std::vector<Port> ports)
      : ChainProgram(ctx, schedule, 0), ports_(std::move(ports)) {}
  std::vector<Port> outputs(int, int) const override { return ports_; }

 private:
  std::vector<Port> ports_;
};

void expect_ports_refused(const std::vector<Port>& ports, const std::vector<std::string>& told) {
  const Schedule schedule = make_schedule(PipelineSchedule::gpipe, 2, 1, 1, true);
  std::string error;
  try {
    run_local(2, [&](const std::shared_ptr<Communicator>& comm) {
      const ExecCtx ctx = ExecCtx::cpu(1, 7);
      DeclaringProgram program(ctx, schedule, ports);
      if (comm->rank() == 0) PipelineExecutor(ctx, *comm).run(schedule, program);
    });
  } catch (const InvalidArgument& refused) {
    error = refused.what();
  }
  for (const std::string& text : told)
    EXPECT_NE(error.find(text), std::string::npos) << text << ": " << error;
}

TEST(Ports, RefusesWhatCannotCross) {
  const Port x{Chain::shape(0), DType::f32, "x"};
  std::vector<Port> many(kMostPorts + 1, x);
  many.back().name = "the ninth";
  expect_ports_refused(many, {"piece 0", "9 values", "x, x", "the ninth", "at most 8"});
  expect_ports_refused({}, {"piece 0", "nothing"});
  expect_ports_refused({{Chain::shape(0), DType::i32, "mask"}},
                       {"piece 0", "'mask'", "int32", "no gradient"});
  expect_ports_refused({x, {Chain::shape(0), DType::f32, "memory"}}, {"stage 0", "F0", "1 values", "go 2"});
  expect_ports_refused({{{7, 7}, DType::f32, "memory"}}, {"stage 0", "F0", "'memory'", "[7, 7]"});
}

}  // namespace
}  // namespace tessera::test
