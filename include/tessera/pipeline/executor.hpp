#pragma once
/// PipelineExecutor: walks one stage's column of a schedule, moving activations and gradients between stages.

#include <functional>
#include <memory>
#include <vector>

#include "tessera/comm/communicator.hpp"
#include "tessera/ops/spans.hpp"
#include "tessera/pipeline/schedule.hpp"
#include "tessera/tensor/port.hpp"

namespace tessera {

/// Values that can cross one boundary between pieces. More are refused by name.
inline constexpr int kMostPorts = 8;

/// What a stage computes. The executor decides when; nothing here communicates between stages.
class StageProgram {
 public:
  virtual ~StageProgram() = default;
  /// `inputs`: what the piece before gave, one for each port of inputs(); empty for the first piece. Returns
  /// what the next piece gets, one for each port of outputs(); nothing for the last piece. What passes
  /// through unchanged may be the same tensor.
  virtual std::vector<Tensor> forward(int chunk, int micro_batch, std::vector<Tensor> inputs) = 0;
  /// `grads`: of what forward returned, empty for the last piece. Returns the gradients of `inputs`, nothing
  /// for the first piece. weights = false: weight gradients wait for weight_gradient().
  virtual std::vector<Tensor> backward(int chunk, int micro_batch, std::vector<Tensor> grads,
                                       bool weights) = 0;
  virtual void weight_gradient(int chunk, int micro_batch) = 0;
  /// What crosses the boundary before this chunk, and the one behind it, for this micro-batch; gradients
  /// alike. The pieces on both sides of a boundary say the same. Not asked where the model begins or ends.
  virtual std::vector<Port> inputs(int chunk, int micro_batch) const = 0;
  virtual std::vector<Port> outputs(int chunk, int micro_batch) const = 0;
};

/// An action as it ran, in the seconds of now_s().
struct ExecutedAction {
  Action action;
  double begin_s = 0, end_s = 0;
  double waited_s = 0;  ///< the thread that runs the stage, before it, for its input
};

class PipelineExecutor {
 public:
  /// `pipeline`: the pp communicator; its size is schedule.stages. Both are kept by reference or value as
  /// given.
  PipelineExecutor(const ExecCtx& ctx, Communicator& pipeline);
  /// Runs the column of this stage. Receives are posted ahead of need, sends do not block the stage; a piece
  /// whose successor is on the same stage hands its tensors over. Errors: what the program throws;
  /// InvalidArgument for ports that cannot be, or outputs that do not fit them; CommunicationError.
  /// `clock`: what times stalls(); null: events of the stream.
  void run(const Schedule& schedule, StageProgram& program,
           const std::shared_ptr<DeviceClock>& clock = nullptr);
  /// What the last run did on this stage.
  const std::vector<ExecutedAction>& executed() const { return executed_; }
  /// The bubble: where in the last run this stage's stream had nothing to do but wait for inputs. On a stream
  /// that goes on while the thread does something else this is not when the thread waits.
  const Spans& stalls() const { return stalls_; }

 private:
  ExecCtx ctx_;
  Communicator& pipeline_;
  std::vector<ExecutedAction> executed_;
  Spans stalls_;
};

}  // namespace tessera
