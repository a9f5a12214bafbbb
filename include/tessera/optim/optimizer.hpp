#pragma once
/// Optimizer: one update of all main weights of a ParamStore.

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/config_optimizer.hpp"
#include "tessera/base/update_state.hpp"
#include "tessera/optim/param_groups.hpp"
#include "tessera/optim/param_store.hpp"
#include "tessera/tensor/host_copy.hpp"

namespace tessera {

struct StepResult {
  double grad_norm = 0.0;    ///< before clipping; not finite when skipped
  double clip_factor = 1.0;  ///< what the gradient was multiplied by
  bool skipped = false;      ///< the gradient was not finite: nothing was changed
  double loss_scale = 1.0;   ///< of the next forward pass
};

/// Dynamic loss scaling, for gradients in float16.
struct LossScale {
  float first = 1.0f;  ///< 1 and no growth: off
  LossScaleRule rule = {};
};

struct UpdateRule;

/// A piece of optimizer state, as checkpoints name it: "adam_m.<parameter>", "adam_v.<parameter>" or
/// "momentum.<parameter>", fp32 in the parameter's shape.
struct NamedTensor {
  std::string name;
  Tensor tensor;
  const Parameter* parameter = nullptr;
};

/// AdamW, Adam or SGD with momentum, by OptimizerConfig, each parameter by the values of its group, which may
/// also have another rule. All that a rank updates by one rule is one kernel call, or, if the store is
/// sharded or split, one for each bucket.
class Optimizer {
 public:
  /// Keeps a reference to `store`, whose offload says where state lies. Without groups they are
  /// ParamGroups::by_decay(config). What the store has frozen stays frozen whatever its group says. Errors:
  /// InvalidArgument if the store is not trainable, for more than kMostGroups groups or a parameter without
  /// one; ConfigError for values that no update can use.
  ///
  /// An update acts on what the store has gradients of (GradientAccumulator::trained): the rest keeps its
  /// weights and moments and does not count the update, as in PyTorch where a gradient is None.
  Optimizer(const ExecCtx& ctx, ParamStore& store, const OptimizerConfig& config,
            const LossScale& loss_scale = {}, ParamGroups groups = {});
  ~Optimizer();
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// Starts one update of main weights and model copy from the store's gradients, clipped to config.clip_grad
  /// (0 = off) by their global norm, as Megatron does: factor clip_grad / (norm + 1e-6) where that is
  /// below 1. The norm is that of the whole model, each element counted once, summed in fp64 over the store's
  /// world; a gradient that is not finite on any rank changes nothing on all of them. Either way the
  /// gradients are used up: the store is open for the next call. Norm, skip and rates are decided where the
  /// gradients are, so the host waits for nothing. `rates(n)`: those of the update after n applied ones, for
  /// each group, taken as they are; asked for each number of updates that may turn out to be right.
  /// Collective over the world; if the store is sharded the new weights are under way to the other data ranks
  /// when this returns. Errors: InvalidArgument if no call was finished since the last update, kMostUnderWay
  /// updates are under way, or the rates are not finite or not one for each group; CommunicationError.
  void launch_step(const std::function<std::vector<UpdateRates>(std::int64_t)>& rates);
  /// The same with rates of all groups, each of which multiplies them by its factors.
  void launch_step(const std::function<UpdateRates(std::int64_t)>& rates);
  /// The norm the next update would find; the gradients stay. Collective over the store's world, waits for
  /// the device. Errors: as launch_step.
  double grad_norm();
  /// Largest norm from the next update on; 0 = no clipping. Errors: ConfigError.
  void set_clip_grad(double max_norm);
  /// The result of the oldest update under way; waits for it.
  StepResult finish_step();
  /// Both.
  StepResult step(double lr, double weight_decay);
  static constexpr std::size_t kMostUnderWay = 3;

  /// What the next pass multiplies its loss by, f32 [1] on the device; undefined if there is no loss scaling.
  Tensor loss_scale() const;
  /// For checkpoints: what a later run goes on from. No update is under way. What is trained has had all its
  /// updates, the rest none, unless set_updates_of says otherwise.
  UpdateState update_state() const;
  void set_update_state(const UpdateState& state);

  /// Updates known to be applied: skipped steps do not count.
  std::int64_t updates() const { return updates_; }
  /// Those that acted on the parameter: Adam's bias correction follows them. Errors: InvalidArgument if the
  /// parameter is not in the store.
  std::int64_t updates_of(const Parameter& parameter) const;
  /// For checkpoints, after set_update_state. Errors: InvalidArgument for numbers that are not in
  /// [0, updates()].
  void set_updates_of(const std::function<std::int64_t(const Parameter&)>& updates);
  /// Views of the state, in registration order of the parameters; writing to them restores a checkpoint.
  /// Errors: InvalidArgument if the store is sharded or the state offloaded: this rank has pieces() of it.
  std::vector<NamedTensor> state() const;
  /// What this rank saves or loads of the state: see ParamStore::pieces. "adam_m" of all parameters, then
  /// "adam_v" (or "momentum").
  std::vector<StatePiece> pieces(PieceSet set) const;
  /// Of one kind. Errors: InvalidArgument if there is no such state.
  std::vector<StatePiece> pieces(PieceSet set, const std::string& kind) const;
  /// Bytes of the state on the device, tiles in passing included. What says which group an element is in
  /// takes 1/64 byte beside it.
  std::size_t persistent_bytes() const;

  const std::vector<ParamGroup>& groups() const { return groups_.groups; }
  /// The place in groups(). Errors: InvalidArgument if the parameter is not in the store.
  std::size_t group_of(const Parameter& parameter) const;
  /// From the next update on. What is frozen is decided when store and optimizer are made. Errors:
  /// InvalidArgument for a group that is not there or becomes frozen or trained; ConfigError for values that
  /// no update can use, or a momentum where no group had any when the optimizer was made.
  void set_group(std::size_t place, const ParamGroup& group);
  /// Whether the parameter is updated, and its group's factor lets weight decay act on it. Errors:
  /// InvalidArgument if the parameter is not in the store.
  bool decays(const Parameter& parameter) const;
  /// Follows what the store has gradients of; an update and grad_norm() begin with it. Local. Errors:
  /// InvalidArgument for more than kMostGroups sets of parameters that differ in group or number of updates.
  void find_active();

 private:
  /// Neighbours that one kernel call updates: in one bucket, or, if the store is neither sharded nor split,
  /// anywhere.
  struct Part {
    std::size_t bucket = 0;
    Range run;
  };

  /// Parameters of one group whose numbers of updates are equal: what one rule is for.
  struct Cohort {
    std::size_t group = 0;
    std::int64_t missed = 0;
    friend auto operator<=>(const Cohort&, const Cohort&) = default;
  };

  /// One of the rules, and what it acts on.
  struct Applied {
    const UpdateRule* rule = nullptr;
    std::vector<Cohort> cohorts = {};  // of what is active; one if there is nothing
    Tensor factors = {};               // of the cohorts
    Tensor of_block = {};          // cohort of each kGroupBlock elements, laid out like the store's zeros()
    std::vector<Part> parts = {};  // in the order of their buckets
  };

  /// What of an update comes from elsewhere, and the tiles in which it does.
  struct Offloaded;
  /// What came of it for a part of an update, by its number in the walk.
  using Brought = std::function<Tensor(std::size_t)>;

  /// Buffers of these kinds, on the device or elsewhere.
  void make_state(const std::vector<std::string>& kinds);
  bool frozen(const Parameter& parameter) const;
  void select(const std::vector<bool>& active);
  void find_cohorts();
  void find_parts();
  void find_parts(Applied& applied);
  void find_counted();
  void find_counted_in_tiles(const std::vector<Range>& runs);
  /// Puts the squares of the pending gradient into the state, unless they are there.
  void find_squares();
  bool keeps(const std::string& kind) const;
  /// `brought`: null where nothing is elsewhere.
  void update(const Applied& applied, const Part& part, const Brought& brought) const;
  /// Bucket by bucket, and new weights on their way.
  void update_all();
  /// The same tile by tile.
  void update_offloaded();

  ExecCtx ctx_;
  ParamStore& store_;
  OptimizerConfig config_;
  LossScale loss_scale_;
  ParamGroups groups_;
  std::vector<GroupRule> rules_;      // by group
  std::vector<bool> excluded_;        // by slot: its group is frozen
  std::vector<bool> active_;          // by slot: what the next update acts on
  std::vector<std::int64_t> missed_;  // by slot, of those: updates that did not act on it
  std::vector<std::int64_t> had_;     // by slot, of the others: updates that did
  std::vector<Applied> applied_;
  std::vector<std::size_t> applied_of_;  // by group: its place in applied_
  std::vector<std::uint8_t> cohort_;     // by slot, of those of its rule
  std::vector<bool> changes_;            // by bucket: whether anything in it is updated, on any data rank
  Tensor state_;                         // UpdateState
  bool has_squares_ = false;             // they are not zero in the state
  std::int64_t squares_of_ = -1;         // the store's gradient_version() they belong to, if they are whole
  Tensor counted_;                       // runs this rank adds to the norm, in the store's gradient
  Tensor counted_in_sum_;                // the same, in the sum of several calls
  std::vector<std::pair<Range, Tensor>> counted_in_tiles_;  // of that, by tiles of offloaded gradients
  std::deque<HostCopy> under_way_;
  std::int64_t updates_ = 0;
  std::map<std::string, Tensor> buffers_;  // the state on the device by kind, as checkpoints name it
  std::unique_ptr<Offloaded> offloaded_;   // null where nothing is elsewhere
};

}  // namespace tessera
