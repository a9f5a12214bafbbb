#include "tessera/pipeline/executor.hpp"

#include <algorithm>
#include <deque>
#include <map>

#include "pipeline/label.hpp"
#include "pipeline/routes.hpp"
#include "tessera/base/clock.hpp"
#include "tessera/base/error.hpp"
#include "tessera/device/flight.hpp"
#include "tessera/device/trace.hpp"

namespace tessera {

namespace {

using Kind = Action::Kind;

/// Receives posted beyond the pass that runs next: enough to hide a message behind one pass, few enough to
/// cost little memory.
constexpr std::size_t kReceivesAhead = 2;

/// The values of a message to or from `peer`, one transfer for each port: they leave and arrive together.
std::vector<Transfer> transfers_of(Transfer::Kind kind, const std::vector<Tensor>& tensors, int peer,
                                   const Message& message, const Routes& routes) {
  std::vector<Transfer> transfers;
  for (std::size_t port = 0; port < tensors.size(); ++port)
    transfers.push_back({kind, tensors[port], peer, routes.tag_of(message, port)});
  return transfers;
}

/// Errors: InvalidArgument unless `values` are what these ports say. `maker()` tells who returned them.
template <typename Maker>
void check_fit(const std::vector<Tensor>& values, const std::vector<Port>& ports, Maker&& maker) {
  TESSERA_CHECK(values.size() == ports.size(), maker(), " returned ", values.size(),
                " values; between pieces go ", ports.size());
  for (std::size_t i = 0; i < ports.size(); ++i) {
    const auto& [shape, dtype, name] = ports[i];
    TESSERA_CHECK(values[i], maker(), " returned no '", name, "' for the next piece");
    TESSERA_CHECK(values[i].shape() == shape && values[i].dtype() == dtype && values[i].is_contiguous(),
                  maker(), " returned ", values[i].dtype(), " ", values[i].shape(), " as '", name,
                  "'; between pieces goes contiguous ", dtype, " ", shape);
  }
}

/// What comes in over the pipeline, taken in the order this stage uses it. Receives from one stage are posted
/// in the order in which that stage makes the messages, as communicators without tags need it; so one that is
/// used late may be posted early.
class Inbox {
 public:
  Inbox(const ExecCtx& ctx, Communicator& pipeline, const Routes& routes, const StageProgram& program,
        std::vector<Message> messages)
      : ctx_(ctx), pipeline_(pipeline), routes_(routes), program_(program), messages_(std::move(messages)) {
    for (const Message& message : messages_) made_[message.from].push_back(message);
    for (auto& [stage, made] : made_) {
      std::sort(made.begin(), made.end(),
                [](const Message& a, const Message& b) { return a.made_at < b.made_at; });
    }
  }

  /// Posts receives until the next `ahead` messages are under way.
  void post(std::size_t ahead) {
    const std::size_t end = std::min(taken_ + ahead, messages_.size());
    for (std::size_t next = taken_; next < end; ++next) post_up_to(messages_[next]);
  }
  /// The values of the next message; `stalls` is told where the stream waits for it.
  std::vector<Tensor> take(Spans& stalls) {
    post(1);
    TESSERA_ENSURE(InternalError, taken_ < messages_.size(), "an input that no pass of the column needs");
    auto message = arriving_.extract(routes_.tag_of(messages_[taken_++]));
    const Spans::Span stall(stalls);
    message.mapped().pending.wait(ctx_);
    return std::move(message.mapped().tensors);
  }

 private:
  struct Arriving {
    std::vector<Tensor> tensors;
    Pending pending;
  };

  void post_up_to(const Message& last) {
    for (auto& made = made_[last.from]; !made.empty() && made.front().made_at <= last.made_at;
         made.pop_front()) {
      const Message& message = made.front();
      std::vector<Tensor> tensors = empty_tensors(ctx_, routes_.used(program_, message));
      Pending pending = pipeline_.exchange(
          ctx_, transfers_of(Transfer::Kind::recv, tensors, message.from, message, routes_));
      arriving_.emplace(routes_.tag_of(message), Arriving{std::move(tensors), std::move(pending)});
    }
  }

  const ExecCtx& ctx_;
  Communicator& pipeline_;
  const Routes& routes_;
  const StageProgram& program_;
  std::vector<Message> messages_;               // as they are used
  std::size_t taken_ = 0;                       // of them
  std::map<int, std::deque<Message>> made_;     // not yet posted, by stage, as they are made
  std::map<std::uint32_t, Arriving> arriving_;  // by tag
};

/// What is on its way out. Nobody may write to a tensor before its message is done, so it is held here.
class Outbox {
 public:
  Outbox(const ExecCtx& ctx, Communicator& pipeline, const Routes& routes)
      : ctx_(ctx), pipeline_(pipeline), routes_(routes) {}

  void send(std::vector<Tensor> tensors, const Message& message) {
    Pending pending =
        pipeline_.exchange(ctx_, transfers_of(Transfer::Kind::send, tensors, message.to, message, routes_));
    leaving_.push_back({std::move(tensors), std::move(pending), message.to, message.used_at});
  }
  /// Lets go of what has arrived, as far as the communicator knows without being waited for.
  void reap() {
    drop([](const Leaving& leaving) { return leaving.pending.done(); });
  }
  /// A message from `stage` is here, made by the pass at `made_at` of its column: what was used before that
  /// has arrived. So memory stays bounded also where nothing is known to be done before it is waited for.
  void settle(int stage, int made_at) {
    drop([&](const Leaving& leaving) { return leaving.to == stage && leaving.used_at < made_at; });
  }
  void finish() {
    for (const Leaving& leaving : leaving_) leaving.pending.wait(ctx_);
    leaving_.clear();
  }

 private:
  struct Leaving {
    std::vector<Tensor> tensors;
    Pending pending;
    int to = 0, used_at = 0;
  };

  template <typename Predicate>
  void drop(Predicate&& has_arrived) {
    std::erase_if(leaving_, [&](const Leaving& leaving) {
      if (!has_arrived(leaving)) return false;
      leaving.pending.wait(ctx_);
      return true;
    });
  }

  const ExecCtx& ctx_;
  Communicator& pipeline_;
  const Routes& routes_;
  std::vector<Leaving> leaving_;
};

/// One walk down one stage's column.
class StageRun {
 public:
  StageRun(const ExecCtx& ctx, Communicator& pipeline, const Schedule& schedule, StageProgram& program,
           std::size_t ahead, Spans& stalls)
      : ctx_(ctx),
        ahead_(ahead),
        stalls_(stalls),
        stage_(pipeline.rank()),
        schedule_(schedule),
        program_(program),
        routes_(schedule),
        inbox_(ctx, pipeline, routes_, program, messages_in()),
        outbox_(ctx, pipeline, routes_) {}

  void run(std::vector<ExecutedAction>& executed) {
    for (const Action& action : column()) {
      outbox_.reap();
      if (ahead_ > 0) inbox_.post(1 + ahead_);
      const double wanted_s = now_s();
      ExecutedAction done;
      done.action = action;
      std::vector<Tensor> inputs = fetch(action);
      done.begin_s = now_s();
      done.waited_s = done.begin_s - wanted_s;
      inbox_.post(ahead_);
      std::vector<Tensor> outputs = compute(action, std::move(inputs));
      done.end_s = now_s();
      executed.push_back(std::move(done));
      deliver(action, std::move(outputs));
    }
    outbox_.finish();
    TESSERA_CHECK(handed_over_.empty(), "stage ", stage_, " made ", handed_over_.size(),
                  " messages for itself that its column never used");
  }

 private:
  const std::vector<Action>& column() const { return schedule_.actions[static_cast<std::size_t>(stage_)]; }

  std::vector<Message> messages_in() const {
    std::vector<Message> messages;
    for (const Action& action : column()) {
      const auto message = routes_.input_of(stage_, action);
      if (message && message->from != stage_) messages.push_back(*message);
    }
    return messages;
  }

  std::string told(const char* what, const Action& action) const {
    return detail::concat("stage ", stage_, ":", what, label_of(action, schedule_.chunks));
  }

  std::vector<Tensor> fetch(const Action& action) {
    const auto message = routes_.input_of(stage_, action);
    if (!message) return {};
    if (message->from != stage_) {
      std::vector<Tensor> inputs = inbox_.take(stalls_);
      outbox_.settle(message->from, message->made_at);
      return inputs;
    }
    auto handed = handed_over_.extract(routes_.tag_of(*message));
    TESSERA_CHECK(!handed.empty(), "stage ", stage_, " comes to ", label_of(action, schedule_.chunks),
                  " before its own pass that makes the input");
    check_fit(handed.mapped(), routes_.used(program_, *message),
              [&] { return told(" the pass before ", action); });
    return std::move(handed.mapped());
  }

  static FlightOperation pass_of(const Action& action) {
    const char* const name = action.kind == Kind::forward           ? "forward"
                             : action.kind == Kind::weight_gradient ? "weight gradients"
                                                                    : "backward";
    return {.name = name, .shape = {action.micro_batch, action.chunk}, .dims = 2};
  }

  std::vector<Tensor> compute(const Action& action, std::vector<Tensor> inputs) {
    const FlightSpan flight(*ctx_.stream, [&] { return pass_of(action); });
    const TraceSpan span(*ctx_.stream, [&] {
      return Work{WorkKind::scope, label_of(action, schedule_.chunks)};
    });
    switch (action.kind) {
      case Kind::forward:
        return program_.forward(action.chunk, action.micro_batch, std::move(inputs));
      case Kind::weight_gradient:
        program_.weight_gradient(action.chunk, action.micro_batch);
        return {};
      default:
        return program_.backward(action.chunk, action.micro_batch, std::move(inputs),
                                 action.kind == Kind::backward);
    }
  }

  void deliver(const Action& action, std::vector<Tensor> outputs) {
    const auto message = routes_.output_of(stage_, action);
    if (!message) return;
    check_fit(outputs, routes_.made(program_, *message), [&] { return told(" ", action); });
    if (message->to == stage_) {
      handed_over_.emplace(routes_.tag_of(*message), std::move(outputs));
    } else {
      outbox_.send(std::move(outputs), *message);
    }
  }

  const ExecCtx& ctx_;
  std::size_t ahead_;
  Spans& stalls_;
  int stage_;
  const Schedule& schedule_;
  StageProgram& program_;
  Routes routes_;
  Inbox inbox_;
  Outbox outbox_;
  std::map<std::uint32_t, std::vector<Tensor>> handed_over_;  // from one piece of this stage to the next
};

}  // namespace

PipelineExecutor::PipelineExecutor(const ExecCtx& ctx, Communicator& pipeline)
    : ctx_(ctx), pipeline_(pipeline), stalls_(ctx.stream) {}

void PipelineExecutor::run(const Schedule& schedule, StageProgram& program,
                           const std::shared_ptr<DeviceClock>& clock) {
  TESSERA_CHECK_EQ(pipeline_.size(), schedule.stages, "ranks of '", pipeline_.name(), "' for stages.");
  TESSERA_CHECK_EQ(schedule.actions.size(), static_cast<std::size_t>(schedule.stages), "columns for stages.");
  // On a GPU the first walk loads code of libraries and allocates their memory, which may wait for everything
  // on the device: so nothing waits there for others ahead of need.
  const bool settled = !ctx_.device().is_cuda() || !executed_.empty();
  executed_.clear();
  stalls_ = Spans(ctx_.stream);
  stalls_.set_clock(clock);
  StageRun(ctx_, pipeline_, schedule, program, settled ? kReceivesAhead : 0, stalls_).run(executed_);
}

}  // namespace tessera
