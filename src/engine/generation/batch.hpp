#pragma once
/// Texts that are computed at once, on the ranks of one data rank.

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/generation/device_decoder.hpp"
#include "engine/generation/drawer.hpp"
#include "engine/generation/lane.hpp"
#include "tessera/base/schedules.hpp"
#include "tessera/comm/mesh.hpp"
#include "tessera/pipeline/executor.hpp"

namespace tessera {
class Engine;
}

namespace tessera::generation {

/// One rank's part of the model that writes.
struct Seat {
  /// Of an engine, which must outlive it. Errors: InvalidArgument for context parallelism.
  static Seat of(Engine& engine);

  ExecCtx ctx;
  Model& model;
  std::shared_ptr<ProcessMesh> self;  ///< where there is no engine
  ProcessMesh& mesh;
  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
  int chunks = 1;
  /// On CUDA: whether decoding passes are launched as graphs (device.cuda_graph).
  AutoSwitch graphs = AutoSwitch::automatic;
  /// All weights are here until the result goes: those that an update still sends, those that are shared out.
  std::function<std::shared_ptr<void>()> hold_weights = {};
  ExecCtx host = ExecCtx::cpu(1);

  Communicator& peers() const { return mesh.group({Axis::tp, Axis::pp}); }
  bool folded() const { return traits_of(schedule).folded; }
  /// Where tokens are drawn: the first tensor rank of the stage with the head, as a rank of peers().
  int speaker() const { return (folded() ? 0 : mesh.shape().pp - 1) * mesh.shape().tp; }
  bool speaks() const { return peers().rank() == speaker(); }
};

struct BatchOptions {
  std::int64_t width = 1;  ///< beams of each text
  std::int64_t texts = 1;  ///< at once; others wait
  std::int64_t prefill_chunk = 512;
};

/// Its members are called by all ranks of Seat::peers() alike.
class DecodeBatch final : public StageProgram {
 public:
  /// `seat` must outlive it.
  DecodeBatch(const Seat& seat, const BatchOptions& options);

  /// Takes in what waits as far as there is room, reads those prompts, then computes the next token of every
  /// text; the next ones, where a pipeline is to be kept full. `done` is told of texts that ended.
  void round(std::deque<std::unique_ptr<Unit>>& waiting, const std::function<void(Unit&)>& done);
  /// Why nothing more can be computed: the speaker knows, on other ranks there is a sign for it. Empty as
  /// long as all is well.
  const std::string& failure() const { return failure_; }
  std::int64_t units() const;
  /// How decoding passes were launched; zeros but for a GPU with the whole model.
  StreamGraph::Stats graph() const { return decoder_ ? decoder_->stats() : StreamGraph::Stats(); }
  /// Between rounds.
  void each(const std::function<void(Unit&)>& look) const;
  /// Texts that were marked as done leave. Between rounds.
  void drop_done();

  std::vector<Tensor> forward(int chunk, int micro_batch, std::vector<Tensor> inputs) override;
  std::vector<Tensor> backward(int, int, std::vector<Tensor>, bool) override { return {}; }
  void weight_gradient(int, int) override {}
  std::vector<Port> inputs(int chunk, int micro_batch) const override;
  std::vector<Port> outputs(int chunk, int micro_batch) const override;

 private:
  /// A pass between its begin and the choice that follows from it.
  struct Step {
    Pass pass;
    MicroBatch input;
    CachePass place;
    Tensor message;  ///< what the speaker tells
    Pending sent;
    bool drawn = false, settled = false;
  };

  bool speaks() const { return peers_.rank() == speaker_; }
  std::size_t lane_count() const { return lanes_.size(); }
  Lane& lane_of(int micro_batch) { return lanes_[static_cast<std::size_t>(micro_batch) % lane_count()]; }
  Step& step_of(int micro_batch) { return steps_.at(static_cast<std::size_t>(micro_batch)); }
  const MicroBatchSize& size_of(int micro_batch) const {
    // Decoding changes no sizes between two runs.
    return sizes_.at(static_cast<std::size_t>(micro_batch));
  }
  /// Fills free places, the lanes alike. Returns whether there are new ones.
  bool admit(std::deque<std::unique_ptr<Unit>>& waiting);
  /// By micro-batch; lanes with fewer chunks have empty ones.
  std::vector<Pass> prefill_passes();
  void decode();
  void decode_on_device();
  void run_passes(std::vector<Pass> passes);
  /// The first of this rank's pieces is about to compute the pass.
  void begin(int micro_batch);
  /// Words of a message: whether drawing failed, then of each unit whether it is done, tokens and parents.
  std::int64_t words(const Step& step) const;
  /// Ranks that heard of a failure have another one's to tell, or none: those with the head go on alike.
  void unless_failed(const std::function<void()>& work);
  void score(const Step& step, const Tensor& logits);
  void draw(int micro_batch, const Tensor& logits);
  /// What was drawn goes to the other ranks of this data rank, and into the texts.
  void tell(int micro_batch, const std::vector<Choice>& choices);
  /// The rows of logits that were asked for; models that know nothing of `last` give those of all positions.
  Tensor wanted(const Step& step, const Tensor& logits) const;
  /// A rank that is done with a pass begins to receive what becomes of it: before it computes another one, as
  /// others may wait for this one's part in the message before they give it that one's input.
  void listen(Step& step);
  /// Waits for what became of a pass, once.
  void settle(int micro_batch);
  /// What the speaker said of a pass becomes the state of its texts.
  void take(int micro_batch);
  void collect(const std::function<void(Unit&)>& done);

  ExecCtx ctx_, host_;
  Model& model_;
  ProcessMesh& mesh_;
  Communicator& peers_;
  PipelineSchedule schedule_;
  int chunks_, speaker_;
  BatchOptions options_;
  Drawer drawer_;
  PipelineExecutor executor_;
  std::unique_ptr<DeviceDecoder> decoder_;  ///< of a GPU that holds the whole model, for texts of one row
  std::deque<Lane> lanes_;
  std::vector<Step> steps_;
  std::vector<MicroBatchSize> sizes_;
  std::string failure_;
};

}  // namespace tessera::generation
