#include "tessera/pipeline/executor.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "chain_program.hpp"
#include "support.hpp"
#include "tests/support/device.hpp"

namespace tessera::test {
namespace {

struct StageOutcome {
  ChainResult result;
  std::vector<ExecutedAction> executed;
  int most_kept = 0;
  std::size_t left = 0;
};

/// Runs the toy chain `rounds` times, with a rank per stage.
std::vector<StageOutcome> run_chain(const Schedule& schedule, const CommOptions& options = {.timeout_s = 30},
                                    int rounds = 1) {
  std::vector<StageOutcome> outcomes(static_cast<std::size_t>(schedule.stages));
  run_local(schedule.stages, options, [&](const std::shared_ptr<Communicator>& comm) {
    const ExecCtx ctx = ExecCtx::cpu(1, 7);
    PipelineExecutor executor(ctx, *comm);
    for (int round = 0; round < rounds; ++round) {
      ChainProgram program(ctx, schedule, comm->rank());
      executor.run(schedule, program);
      outcomes[static_cast<std::size_t>(comm->rank())] = {program.result(), executor.executed(),
                                                          program.most_kept(), program.left()};
    }
  });
  return outcomes;
}

ChainResult together(const std::vector<StageOutcome>& outcomes) {
  ChainResult sum;
  for (const StageOutcome& outcome : outcomes) {
    sum.loss += outcome.result.loss;
    for (const auto& [piece, gradient] : outcome.result.gradients) {
      EXPECT_TRUE(sum.gradients.emplace(piece, gradient).second) << "piece " << piece << " on two stages";
    }
  }
  return sum;
}

void expect_as_planned(const Schedule& schedule, const std::vector<StageOutcome>& outcomes) {
  const Chain chain{schedule.pieces(), schedule.micro_batches};
  EXPECT_EQ(together(outcomes), run_serially(chain, schedule.forward_only)) << describe(schedule);
  const std::vector<int> held = simulate(schedule, {PassTimes{}}).most_in_flight;
  for (std::size_t stage = 0; stage < outcomes.size(); ++stage) {
    const StageOutcome& outcome = outcomes[stage];
    std::vector<Action> order;
    double end_s = 0;
    for (const ExecutedAction& executed : outcome.executed) {
      order.push_back(executed.action);
      EXPECT_GE(executed.begin_s - executed.waited_s, end_s);
      EXPECT_GE(executed.end_s, executed.begin_s);
      EXPECT_GE(executed.waited_s, 0.0);
      end_s = executed.end_s;
    }
    EXPECT_EQ(order, schedule.actions[stage]) << describe(schedule) << " stage " << stage;
    EXPECT_EQ(outcome.most_kept, held[stage]) << describe(schedule) << " stage " << stage;
    EXPECT_EQ(outcome.left, 0u);
  }
}

TEST(Executor, EveryScheduleGivesTheSerialResult) {
  for_all_schedules(4, 3, 8,
                    [](const Schedule& schedule) { expect_as_planned(schedule, run_chain(schedule)); });
}

/// Slow messages, and several calls in a row whose messages have the same tags.
TEST(Executor, SlowMessagesAndSeveralCalls) {
  for (const PipelineSchedule kind : kSchedules) {
    const int chunks = is_possible(kind, 3, 1, 6, false) ? 1 : 2;
    const Schedule schedule = make_schedule(kind, 3, chunks, 6);
    expect_as_planned(schedule, run_chain(schedule, {.timeout_s = 30, .delay_s = 1e-3}, 3));
  }
}

/// Takes `pass_s` for every pass.
class SlowProgram final : public ChainProgram {
 public:
  SlowProgram(const ExecCtx& ctx, const Schedule& schedule, int stage, double pass_s)
      : ChainProgram(ctx, schedule, stage), pass_(pass_s) {}

 private:
  void on_pass(const Action&) override { std::this_thread::sleep_for(pass_); }
  std::chrono::duration<double> pass_;
};

/// How long the second of two stages waited for each of its inputs in evaluation.
std::vector<double> waits_of_second_stage(double message_s, double pass_s) {
  const Schedule schedule = make_schedule(PipelineSchedule::gpipe, 2, 1, 8, true);
  std::vector<double> waits;
  run_local(2, {.timeout_s = 30, .delay_s = message_s}, [&](const std::shared_ptr<Communicator>& comm) {
    const ExecCtx ctx = ExecCtx::cpu(1, 7);
    SlowProgram program(ctx, schedule, comm->rank(), pass_s);
    PipelineExecutor executor(ctx, *comm);
    executor.run(schedule, program);
    if (comm->rank() == 0) return;
    for (const ExecutedAction& executed : executor.executed()) waits.push_back(executed.waited_s);
  });
  return waits;
}

/// A message takes almost as long as a pass. Posted ahead, it arrives during the pass before; only the first
/// has nothing to hide behind.
TEST(Executor, MessagesAreHiddenBehindPasses) {
  double first_s = 0, median_s = 1;
  for (int attempt = 0; attempt < 3 && (first_s < 15e-3 || median_s > 4e-3); ++attempt) {
    std::vector<double> waits = waits_of_second_stage(9e-3, 10e-3);
    first_s = waits.front();
    std::sort(waits.begin(), waits.end());
    median_s = waits[waits.size() / 2];
  }
  EXPECT_GE(first_s, 15e-3);
  EXPECT_LE(median_s, 4e-3);
}

/// Two stages, on whatever device there is. The first takes its time on the host.
class TakesItsTime final : public StageProgram {
 public:
  TakesItsTime(const ExecCtx& ctx, int stage) : ctx_(ctx), stage_(stage) {}
  std::vector<Tensor> forward(int, int, std::vector<Tensor>) override {
    if (stage_ == 1) return {};
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return {Tensor::empty(ctx_, {5}, DType::f32)};
  }
  std::vector<Tensor> backward(int, int, std::vector<Tensor>, bool) override { return {}; }
  void weight_gradient(int, int) override {}
  std::vector<Port> inputs(int, int) const override { return {{{5}, DType::f32, "x"}}; }
  std::vector<Port> outputs(int, int) const override { return {{{5}, DType::f32, "x"}}; }

 private:
  ExecCtx ctx_;
  int stage_;
};

/// The bubble is the stream's: a thread that only leaves work behind has gone on long before.
TEST(Executor, TellsHowLongTheStreamWaited) {
  const Schedule schedule = make_schedule(PipelineSchedule::gpipe, 2, 1, 8, true);
  run_on_device(2, {.timeout_s = 30}, [&](const std::shared_ptr<Communicator>& comm) {
    const ExecCtx ctx = context();
    TakesItsTime program(ctx, comm->rank());
    PipelineExecutor executor(ctx, *comm);
    executor.run(schedule, program);  // connects the ranks
    comm->barrier(ctx);
    executor.run(schedule, program);
    const double stalled = executor.stalls().seconds();
    double waited = 0;
    for (const ExecutedAction& executed : executor.executed()) waited += executed.waited_s;
    if (comm->rank() == 0) {
      EXPECT_EQ(stalled, 0.0) << "nothing comes in";
      return;
    }
    EXPECT_GE(stalled, 40e-3) << "of 80 ms";
    if (on_cuda()) {
      EXPECT_LT(waited, stalled / 2);
    } else {
      EXPECT_LE(stalled, waited);
    }
  });
}

/// Every message takes 20 ms. The first stage is through with its 8 passes before the second, which takes 10
/// ms for each, begins its fifth.
TEST(Executor, SendsDoNotBlock) {
  const Schedule schedule = make_schedule(PipelineSchedule::gpipe, 2, 1, 8, true);
  double first_ended_s = 0, second_began_fifth_s = 0;
  run_local(2, {.timeout_s = 30, .delay_s = 20e-3}, [&](const std::shared_ptr<Communicator>& comm) {
    const ExecCtx ctx = ExecCtx::cpu(1, 7);
    SlowProgram program(ctx, schedule, comm->rank(), comm->rank() == 0 ? 0.0 : 10e-3);
    PipelineExecutor executor(ctx, *comm);
    executor.run(schedule, program);
    if (comm->rank() == 0) first_ended_s = executor.executed().back().end_s;
    if (comm->rank() == 1) second_began_fifth_s = executor.executed()[4].begin_s;
  });
  EXPECT_LT(first_ended_s, second_began_fifth_s);
}

/// Passes messages on to another communicator. Sends are not known to be done until they have been waited
/// for; counts those that have not.
class LazyCommunicator final : public Communicator {
 public:
  explicit LazyCommunicator(std::shared_ptr<Communicator> inner)
      : Communicator(inner->rank(), inner->size(), "lazy", {.timeout_s = 30}), inner_(std::move(inner)) {}
  void abort(const std::string& reason) override { inner_->abort(reason); }
  std::string failure() const override { return inner_->failure(); }
  int most_open() const { return most_open_; }
  int open() const { return open_; }

 protected:
  Pending start(const ExecCtx& ctx, Request request) override {
    const bool counted = request.transfers.front().kind == Transfer::Kind::send;
    if (counted) most_open_ = std::max(most_open_, ++open_);
    return Pending(std::make_shared<Lazy>(inner_->exchange(ctx, std::move(request.transfers)),
                                          counted ? &open_ : nullptr));
  }
  std::shared_ptr<Communicator> do_split(int, int, const std::string&, std::uint64_t, const Where&) override {
    return nullptr;
  }

 private:
  class Lazy final : public Pending::State {
   public:
    Lazy(Pending pending, int* open) : pending_(std::move(pending)), open_(open) {}
    void wait(const ExecCtx& ctx) override {
      pending_.wait(ctx);
      if (!waited_ && open_ != nullptr) --*open_;
      waited_ = true;
    }
    bool done() const override { return waited_; }

   private:
    Pending pending_;
    int* open_;
    bool waited_ = false;
  };

  std::shared_ptr<Communicator> inner_;
  int open_ = 0, most_open_ = 0;  // of this rank's thread
};

TEST(Executor, SentTensorsAreNotKeptToTheEnd) {
  for (const PipelineSchedule kind : {PipelineSchedule::one_f_one_b, PipelineSchedule::interleaved,
                                      PipelineSchedule::zb_h1, PipelineSchedule::zb_v}) {
    const int chunks = is_possible(kind, 3, 1, 24, false) ? 1 : 2;
    const Schedule schedule = make_schedule(kind, 3, chunks, 24);
    const std::vector<int> held = simulate(schedule, {PassTimes{}}).most_in_flight;
    run_local(3, [&](const std::shared_ptr<Communicator>& comm) {
      const ExecCtx ctx = ExecCtx::cpu(1, 7);
      LazyCommunicator lazy(comm);
      ChainProgram program(ctx, schedule, comm->rank());
      PipelineExecutor(ctx, lazy).run(schedule, program);
      // Activations that the next stage holds too, and as many gradients.
      EXPECT_LE(lazy.most_open(), 2 * held[static_cast<std::size_t>(comm->rank())] + 2) << describe(schedule);
      EXPECT_GT(lazy.most_open(), 0);
      EXPECT_EQ(lazy.open(), 0);
    });
  }
}

class FailingProgram final : public ChainProgram {
 public:
  using ChainProgram::ChainProgram;

 private:
  void on_pass(const Action& action) override {
    if (action == Action{Kind::backward, 0, 1}) throw std::domain_error("planted");
  }
};

TEST(Executor, ErrorsOfTheProgramReachTheCaller) {
  const Schedule schedule = make_schedule(PipelineSchedule::one_f_one_b, 3, 1, 4);
  std::vector<std::string> errors(3);
  const auto work = [&](const std::shared_ptr<Communicator>& comm) {
    const ExecCtx ctx = ExecCtx::cpu(1, 7);
    ChainProgram sound(ctx, schedule, comm->rank());
    FailingProgram failing(ctx, schedule, comm->rank());
    PipelineExecutor executor(ctx, *comm);
    try {
      executor.run(schedule, comm->rank() == 1 ? static_cast<StageProgram&>(failing) : sound);
    } catch (const std::exception& error) {
      errors[static_cast<std::size_t>(comm->rank())] = error.what();
      throw;
    }
  };
  EXPECT_THROW(run_local(3, work), std::domain_error);
  EXPECT_EQ(errors[1], "planted");
  // The first stage never gets its last gradients. The last has all it needs, unless it was ended before.
  EXPECT_NE(errors[0].find("planted"), std::string::npos) << errors[0];
}

/// Returns what does not fit between pieces.
class MisshapenProgram final : public ChainProgram {
 public:
  using ChainProgram::ChainProgram;
  std::vector<Tensor> forward(int, int, std::vector<Tensor>) override { return {output}; }
  Tensor output;
};

TEST(Executor, RefusesOutputsThatDoNotFit) {
  const Schedule schedule = make_schedule(PipelineSchedule::gpipe, 2, 1, 1);
  const ExecCtx ctx = ExecCtx::cpu(1, 7);
  const std::vector<Tensor> outputs = {Tensor(), Tensor::empty(ctx, {3, 2}, DType::f32),
                                       Tensor::empty(ctx, {2, 2}, DType::bf16),
                                       Tensor::empty(ctx, {2, 2}, DType::f32).transpose(0, 1)};
  for (const Tensor& output : outputs) {
    EXPECT_THROW(run_local(2,
                           [&](const std::shared_ptr<Communicator>& comm) {
                             MisshapenProgram program(ctx, schedule, comm->rank());
                             program.output = output;
                             if (comm->rank() == 0) PipelineExecutor(ctx, *comm).run(schedule, program);
                           }),
                 InvalidArgument);
  }
}

TEST(Executor, RefusesAScheduleForAnotherNumberOfStages) {
  const Schedule schedule = make_schedule(PipelineSchedule::gpipe, 2, 1, 1);
  const ExecCtx ctx = ExecCtx::cpu(1, 7);
  const auto self = make_self_communicator();
  ChainProgram program(ctx, schedule, 0);
  EXPECT_THROW(PipelineExecutor(ctx, *self).run(schedule, program), InvalidArgument);
}

}  // namespace
}  // namespace tessera::test
