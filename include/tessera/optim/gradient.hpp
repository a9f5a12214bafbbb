#pragma once
/// GradientAccumulator: the life of a ParamStore's gradient, from the calls that compute it to the update
/// that takes it.

#include <functional>
#include <memory>
#include <vector>

#include "tessera/optim/gradient_memory.hpp"
#include "tessera/optim/shards.hpp"

namespace tessera {

class GradientReduction;
struct StoreGroups;

/// The gradient of everything since the last update: `scale` times the elements of `flat`.
struct FlatGradient {
  Tensor flat;
  double scale = 1.0;
};

/// The backward passes of a call where ranks hold shares of the gradient; nothing happens where it is whole.
class GradientPasses {
 public:
  /// `reduction`: null where gradients are whole.
  explicit GradientPasses(GradientReduction* reduction) : reduction_(reduction) {}
  /// A pass contributes once to parameters of these buckets, whose sums start in this order as they become
  /// complete, at the latest in end(), and are added to the shares. Every data rank has the same passes in
  /// the same order, also one that computes nothing in them.
  void begin(std::vector<std::size_t> buckets);
  /// This rank contributes nothing more to these buckets.
  void complete(const std::vector<std::size_t>& buckets);
  void end();
  /// Adds sums that are still on their way.
  void settle();
  /// Bytes of memory that is there from a bucket's first contribution to its reduction.
  std::size_t held_bytes() const;

 private:
  GradientReduction* reduction_;
};

/// Gradients of several calls: begin_call, backward passes, finish_call(factor), once or more; then an update
/// takes their sum. The buckets hold one call's gradient; a second buffer, of what this rank updates, comes
/// into being with the first second call. A call is open, closed (summed over ranks, but nobody has said its
/// factor) or finished; what finished calls left is in the buckets, times the only one's factor, or in the
/// sum.
class GradientAccumulator {
 public:
  /// `layout`, `groups` and `shards` are kept by reference. `frozen`: by slot. Not `trainable`: there is no
  /// memory, and members that compute throw InvalidArgument. `place`: what offloads gradients, or null; they
  /// are then shares.
  GradientAccumulator(const ExecCtx& ctx, const FlatLayout& layout, const Shards& shards,
                      const StoreGroups& groups, bool trainable, std::vector<bool> frozen,
                      std::shared_ptr<OffloadPlace> place = nullptr);
  ~GradientAccumulator();
  GradientAccumulator(const GradientAccumulator&) = delete;
  GradientAccumulator& operator=(const GradientAccumulator&) = delete;

  /// Opens the next call: its first contribution to each gradient overwrites. What a call that was never
  /// finished left is forgotten. It is open already at first, so the first call needs no begin_call.
  ///
  /// `contributions`: how often ready() will be called for each parameter before finish_call. A bucket's
  /// reduction then starts, and runs during the rest of backward, as soon as all of its parameters and all
  /// buckets before it are complete. Left out, all reductions start in finish_call. Such a call is collective
  /// over the data ranks from here on, also when it is never finished.
  void begin_call(const std::function<int(const Parameter&)>& contributions = nullptr);
  /// One contribution was written (Tape::on_gradient_ready). No-op in calls without counts. Errors:
  /// InvalidArgument if none was left to come.
  void ready(Parameter& parameter);
  /// Where a rank holds a share of the gradient only. Without passes one sum of each bucket is made in
  /// finish_call.
  GradientPasses passes();
  /// Closes the call: zeroes the gradients nobody wrote, sums over all groups, and adds `factor` times the
  /// result to what earlier calls left. Collective. Errors: InvalidArgument if no call is open;
  /// CommunicationError.
  void finish_call(double factor = 1.0);
  /// finish_call in two halves, for a factor that is known later: close_call sums over all groups
  /// (collective), and then add_call adds, drop_call forgets, or set_call_aside copies what was summed (laid
  /// out like ParamStore::zeros()), so that the next call may begin; add_set_aside adds such a copy.
  /// `repeated`: its passes and sums were launched by a graph of an earlier call like it, and nothing is left
  /// to do.
  void close_call(bool repeated = false);
  bool call_is_closed() const { return call_ == Call::closed; }
  void add_call(double factor);
  void drop_call();
  GradientMemory set_call_aside();
  void add_set_aside(const GradientMemory& gradient, double factor);
  /// Calls finished since the last discard().
  int finished_calls() const { return finished_calls_; }
  /// By slot: whether the parameter was trained in one of the finished calls, so that an update acts on it.
  const std::vector<bool>& trained() const { return trained_; }
  /// Another number whenever pending() or scale() may give something else. The same on all ranks.
  std::int64_t version() const { return version_; }

  /// The latest call's gradients, [layout.numel()], or undefined when not trainable. Sharded: finished sums
  /// in this rank's shares alone. With Shards::shares_gradient() these shares are all there is, laid out as
  /// ParamStore::zeros().
  const GradientMemory& latest_call() const { return buckets_; }
  /// The sum over finished calls. Errors: InvalidArgument if there is none, or if sharded.
  FlatGradient sum() const;
  /// What the gradients of pending() are still to be multiplied by. Errors: InvalidArgument if no call was
  /// finished.
  double scale() const;
  /// The gradient an update takes, still to be multiplied by scale(): laid out like the flat buffers, or with
  /// `summed` like a buffer made by ParamStore::zeros(). Errors: InvalidArgument if no call was finished.
  struct Pending {
    const GradientMemory* flat;
    bool summed = false;
  };
  Pending pending() const;
  /// Elements `run` of it, which lie inside Shards::updated(bucket), where they are.
  StateValues of(std::size_t bucket, const Range& run) const;
  /// The gradient an update would take in the parameter's shape, whole on every data rank (always a copy).
  /// Collective over the data ranks. Errors: InvalidArgument if no call was finished.
  Tensor whole(const Parameter& parameter) const;

  /// Forgets all gradients and opens the first call. The memory stays.
  void discard();
  /// Forgets finished calls alone: one that is closed but not added stays.
  void forget();
  /// For checkpoints: makes `calls` finished calls of the gradient that is then written into
  /// ParamStore::gradient_pieces() of PieceSet::held, of the parameters `trained` names, in place of what was
  /// there.
  void restore(int calls, const std::function<bool(const Parameter&)>& trained);
  /// Gives the parameter of slot `slot` its gradient: memory, or where that comes and goes a way to get some.
  void bind(std::size_t slot);
  /// ParamStore::set_frozen, before parameters are bound anew. `frozen`: by slot.
  void set_frozen(std::vector<bool> frozen);
  /// Of the device's memory.
  std::size_t persistent_bytes() const;

 private:
  enum class Call { open, closed, none };
  enum class Place { nowhere, buckets, sum };

  /// Where elements `run` of the latest call's gradient lie, which are inside Shards::updated(bucket).
  Range latest(std::size_t bucket, const Range& run) const;
  void check_trainable() const;
  void make_reduction();
  const GradientMemory& sum_memory();
  void copy_latest(const GradientMemory& to, double factor, bool adds);
  void add_to_sum(double factor, float beta);
  void move_to_sum();
  void note_finished(Place place);
  void forget_finished();
  void clear_contributions();

  ExecCtx ctx_;
  const FlatLayout& layout_;
  const Shards& shards_;
  const StoreGroups& groups_;
  std::vector<bool> frozen_;   // by slot
  std::vector<bool> trained_;  // by slot
  std::shared_ptr<OffloadPlace> place_of_memory_;
  GradientMemory buckets_;  // see latest_call(); undefined: not trainable
  GradientMemory sum_;      // laid out as ParamStore::zeros()
  std::unique_ptr<GradientReduction> reduction_;
  Call call_ = Call::open;
  Place place_ = Place::nowhere;  // of what finished calls left
  double factor_ = 1;             // of the only call, whose gradient is still in the buckets
  int finished_calls_ = 0;
  std::int64_t version_ = 0;
};

}  // namespace tessera
