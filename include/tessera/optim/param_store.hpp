#pragma once
/// ParamStore: gives parameters their memory, in a few flat buffers that one kernel call can walk over, and
/// moves what data, tensor and pipeline ranks share of it: gradients to their sums, new weights back.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/autograd/parameter.hpp"
#include "tessera/comm/communicator.hpp"
#include "tessera/ops/optimizer.hpp"
#include "tessera/optim/layout.hpp"

namespace tessera {

class GradientReduction;

/// The ranks over which gradients are summed; null = this rank alone. They outlive the store.
struct StoreGroups {
  Communicator* data = nullptr;       ///< hold the same parameters, see other samples
  Communicator* tensor = nullptr;     ///< for ParameterTraits::partial_over_tensor
  Communicator* embedding = nullptr;  ///< for ParameterTraits::tied
  Communicator* world = nullptr;      ///< for the global norm: contains all of the others
  /// Neighbouring tensor ranks that hold the same runs of rows (Segment::copies).
  std::function<Communicator&(int copies)> tensor_block = {};
};

struct ParamStoreOptions {
  DType compute = DType::f32;  ///< what kernels read: f32 (the main weights themselves), bf16 or f16 (a copy)
  /// bf16: main weights that no kernel reads in fp32 are kept as the copy and their low 16 bits
  /// (ops::split_main).
  bool split_main = false;
  bool trainable = true;  ///< false: no gradient memory, parameters are not trained
  StoreGroups groups = {};
  /// 0: every data rank updates everything; 1: each updates its share of every bucket, then weights are
  /// gathered.
  int zero_stage = 0;
  /// A bucket closes once it holds so many elements; 0 = max(40e6, 1e6 * data ranks), as in Megatron.
  std::int64_t bucket_elements = 0;
  /// Parameters that are not trained, alike on all ranks (Parameter::trained): backward computes no gradient
  /// of them, and what is stored as one is zero.
  std::function<bool(const Parameter&)> frozen = {};
};

/// The gradient of everything since the last update: `scale` times the elements of `flat`.
struct FlatGradient {
  Tensor flat;
  double scale = 1.0;
};

/// Values of a store that count as fp32, where they lie: as such, or split by ops::split_main.
struct StateValues {
  Tensor values;    ///< f32, or bf16 beside `low`
  Tensor low = {};  ///< u16; undefined unless the values are split

  std::int64_t numel() const { return values.numel(); }
  StateValues narrow(std::int64_t begin, std::int64_t count) const;
  /// In fp32: a view, or of split values a copy.
  Tensor read(const ExecCtx& ctx) const;
  /// Sets them to numel() floats of host memory.
  void write(const ExecCtx& ctx, const float* source) const;
};

/// Elements [begin, end) of this rank's part of a parameter, as checkpoints read and write them; where they
/// lie in the whole parameter: parameter->placement().boxes(begin, end).
struct StatePiece {
  std::string kind;  ///< "param", "adam_m", "adam_v" or "momentum"
  Parameter* parameter = nullptr;
  std::int64_t begin = 0, end = 0;
  StateValues values;  ///< [end - begin]: writing restores a checkpoint

  /// "param.<name of the parameter>", ...
  std::string name() const { return kind + "." + parameter->name(); }
  /// The boxes of the whole parameter that it consists of, and the values of each, which lie together.
  struct Box {
    Placed place;
    StateValues values;
  };
  std::vector<Box> boxes() const;
};
enum class PieceSet {
  /// What this rank saves: pieces of all ranks together cover every element of the model exactly once.
  owned,
  /// What this rank must be given to resume.
  held
};

/// Owns fp32 main weights, their 16-bit compute copy (bf16 and f16 only) and fp32 gradients: flat buffers
/// that share one layout (FlatLayout); the gaps are zero and stay zero. With split_main the low 16 bits of
/// the main weights stand in their place, except for ParameterTraits::reads_main.
///
/// Gradients of several calls: begin_call, backward passes, finish_call(factor), once or more; then an update
/// takes their sum. The gradient buffer holds one call's gradient; a second buffer for the sum comes into
/// being with the first second call.
///
/// With several data ranks (groups.data) finish_call leaves sums over them, and with zero_stage 1 (`sharded`)
/// only those of this rank's share of each bucket: it alone has optimizer state, and with a copy it alone has
/// main weights, except where kernels read these. So persistent bytes per parameter, the optimizer's two
/// moments included, are 16 in fp32 and 18 in bf16 or f16, sharded over d ranks 8 + 8/d and 6 + 12/d
/// (10 + 8/d for ParameterTraits::reads_main). Split they are 16, and 6 + 10/d.
class ParamStore {
 public:
  static constexpr std::int64_t kAlignment = FlatLayout::kAlignment;

  /// Allocates, initialises every parameter by its Init (normal numbers keyed by (ctx.seed, name, global
  /// element): every layout draws the same) and binds it. Collective over groups.tensor if that has several
  /// ranks. Errors: InvalidArgument for null or empty parameters, a name used twice, a compute dtype other
  /// than f32, bf16 and f16, split_main with one other than bf16, a zero_stage other than 0 and 1, or groups
  /// without a world.
  ParamStore(const ExecCtx& ctx, std::vector<Parameter*> parameters, const ParamStoreOptions& options = {});
  ~ParamStore();
  ParamStore(const ParamStore&) = delete;
  ParamStore& operator=(const ParamStore&) = delete;

  /// In the order they were registered.
  const std::vector<Parameter*>& parameters() const { return parameters_; }
  const FlatLayout& layout() const { return layout_; }
  /// In the order they lie in memory.
  const std::vector<ParamSlot>& slots() const { return layout_.slots(); }
  /// Elements of each flat buffer, gaps included.
  std::int64_t numel() const { return layout_.numel(); }
  DType compute_dtype() const { return options_.compute; }
  bool trainable() const { return options_.trainable; }
  /// Whether the parameter is frozen. Errors: InvalidArgument if it is not here.
  bool frozen(const Parameter& parameter) const { return frozen_[layout_.index_of(parameter)]; }
  /// What is frozen from the next call on, alike on all ranks, in place of ParamStoreOptions::frozen.
  /// Finished calls keep the gradients they gave; tapes recorded before must not run any more. Errors:
  /// InvalidArgument between close_call and what follows it.
  void set_frozen(const std::function<bool(const Parameter&)>& frozen);
  /// By slot: whether the parameter was trained in one of the finished calls, so that an update acts on it.
  const std::vector<bool>& has_gradient() const { return has_gradient_; }
  const StoreGroups& groups() const { return options_.groups; }
  /// Whether this rank updates only its share of each bucket.
  bool sharded() const { return sharded_; }
  /// Whether the main weights of a bucket are split.
  bool splits_main(const Bucket& bucket) const { return options_.split_main && !bucket.reads_main; }
  /// Bytes of the buffers held at present. The optimizer's own are not among them.
  std::size_t persistent_bytes() const;

  /// fp32 [numel()], or undefined when this rank holds only shares of it (a copy, sharded) or splits some.
  Tensor main_buffer() const;
  /// In the compute dtype [numel()], or undefined when kernels read the main weights.
  const Tensor& model_buffer() const;
  /// fp32 [numel()] with the latest call's gradients, or undefined when not trainable. Sharded: finished sums
  /// in this rank's shares alone.
  const Tensor& grad_buffer() const { return grad_; }

  /// The fp32 main weight, in the parameter's shape. Errors: InvalidArgument if the parameter is not in this
  /// store, this rank holds only a share of it, or it is split.
  Tensor main(const Parameter& parameter) const;
  /// The parameter's part of a buffer of numel() elements with this store's layout, in the parameter's shape.
  Tensor view(const Tensor& buffer, const Parameter& parameter) const;
  /// A new zeroed fp32 buffer for optimizer state: numel() elements, or the shares of this rank one after the
  /// other.
  Tensor zeros() const;

  /// Main weights in fp32 in the parameter's shape, whole on every data rank: a view, or where needed a
  /// copy that was gathered or joined. Collective over groups.data.
  Tensor whole_main(const Parameter& parameter) const;
  /// The gradient an update would take, likewise (always a copy). Errors: InvalidArgument if no call was
  /// finished.
  Tensor whole_gradient(const Parameter& parameter) const;

  /// Rounds the main weights this rank holds into what kernels read; needed after main weights were written
  /// by hand. No-op for f32, and for split weights, which are what kernels read.
  void refresh_model_copy();
  /// After main weights were written, on every rank those of PieceSet::held: brings them to all data ranks
  /// and into what kernels read. Collective over groups.data if sharded.
  void gather_weights();
  /// Bucket `bucket` was updated in this rank's share: starts to gather it; its parameters wait for that
  /// before they are read next. Every data rank calls this for the same buckets in the same order. No-op
  /// unless sharded.
  void spread_weights(std::size_t bucket);
  /// Waits for all that is under way. Everything here that gives access to weights does so by itself.
  void wait_for_weights() const;

  /// Opens the next call: its first contribution to each gradient overwrites. What a call that was never
  /// finished left is forgotten. A store without gradients is open already, so the first call needs no
  /// begin_call.
  ///
  /// `contributions`: how often gradient_ready will be called for each parameter before finish_call. A
  /// bucket's reduction then starts, and runs during the rest of backward, as soon as all of its parameters
  /// and all buckets before it are complete. Left out, all reductions start in finish_call. Such a call is
  /// collective over groups.data from here on, also when it is never finished.
  void begin_call(const std::function<int(const Parameter&)>& contributions = nullptr);
  /// One contribution was written (Tape::on_gradient_ready). No-op in calls without counts. Errors:
  /// InvalidArgument if none was left to come.
  void gradient_ready(Parameter& parameter);
  /// Closes the call: zeroes the gradients nobody wrote, sums over all groups, and adds `factor` times the
  /// result to what earlier calls left. Collective. Errors: InvalidArgument if no call is open;
  /// CommunicationError.
  void finish_call(double factor = 1.0);
  /// finish_call in two halves, for a factor that is known later: close_call sums over all groups
  /// (collective), and then add_call adds, drop_call forgets, or set_call_aside copies what was summed (laid
  /// out like zeros()), so that the next call may begin; add_set_aside adds such a copy.
  void close_call();
  /// Whether a call is closed and was neither added nor dropped nor set aside.
  bool call_is_closed() const { return closed_; }
  void add_call(double factor);
  void drop_call();
  Tensor set_call_aside();
  void add_set_aside(const Tensor& gradient, double factor);
  /// Calls finished since the last discard_gradients().
  int finished_calls() const { return finished_calls_; }
  /// Another number whenever pending_gradient() or gradient_scale() may give something else. The same on all
  /// ranks.
  std::int64_t gradient_version() const { return gradient_version_; }
  /// The sum over finished calls. Errors: InvalidArgument if there is none, or if sharded.
  FlatGradient gradients() const;
  /// What the gradients of owned() are still to be multiplied by. Errors: InvalidArgument if there are none.
  double gradient_scale() const;
  /// Forgets all gradients and opens the store for a first call. The memory stays.
  void discard_gradients();
  /// Forgets finished calls alone: one that is closed but not added stays.
  void forget_gradients();
  /// For checkpoints: makes `calls` finished calls of the gradient that is then written into
  /// gradient_pieces() of PieceSet::held, of the parameters `has_gradient` names, in place of what was there.
  void restore_gradients(int calls, const std::function<bool(const Parameter&)>& has_gradient);

  /// The elements of `bucket` this rank updates: all of them, or its share.
  FlatRun updated(std::size_t bucket) const { return owned_[bucket].run; }
  /// This rank's share of `bucket` whether sharded or not: where it alone adds to norms and saves.
  FlatRun share(std::size_t bucket) const;
  /// Elements of a buffer made by zeros().
  std::int64_t state_numel() const { return state_numel_; }
  /// Where elements `run` of updated(bucket) lie in such a buffer.
  FlatRun in_state(std::size_t bucket, const FlatRun& run) const {
    return {owned_[bucket].state + run.begin - owned_[bucket].run.begin, run.count};
  }
  /// The gradient an update takes, still to be multiplied by gradient_scale(): laid out like the flat
  /// buffers, or with `summed` like a buffer made by zeros(). Errors: InvalidArgument if no call was
  /// finished.
  struct PendingGradient {
    Tensor flat;
    bool summed = false;
  };
  PendingGradient pending_gradient() const;
  /// What an update of elements `run` reads and writes; they lie inside updated(bucket) or, where the store
  /// is neither sharded nor split, anywhere behind the bucket's begin. `weights.model` is undefined where
  /// nothing is to be rounded; `state`: where they lie in a buffer made by zeros().
  struct Slice {
    Tensor gradient;
    ops::MainWeights weights;
    FlatRun state;
  };
  Slice slice(std::size_t bucket, const FlatRun& run) const;

  /// Elements of the parameter that this rank counts in norms and saves, before they are divided among data
  /// ranks: none of a copy that another stage counts, replicated ones on tensor rank 0, runs of which several
  /// tensor ranks have copies on the first of these.
  std::vector<FlatRun> counted(const Parameter& parameter) const;
  /// Pieces of main weights ("param"), in registration order.
  std::vector<StatePiece> pieces(PieceSet set) const;
  /// Pieces of the gradient an update would take ("grad"), still to be multiplied by gradient_scale().
  std::vector<StatePiece> gradient_pieces(PieceSet set) const;
  /// Pieces of a buffer made by zeros().
  std::vector<StatePiece> pieces(PieceSet set, const std::string& kind, const Tensor& state) const;

 private:
  /// The part of a bucket this rank updates, and where it begins in the other buffers: `main` in main_, or in
  /// low_ if the bucket is split.
  struct Owned {
    FlatRun run;
    std::int64_t state = 0, main = 0;
  };
  struct Gather {
    Pending pending;
    bool running = false;
  };
  struct Cut;

  std::vector<std::int64_t> capacities() const;
  void divide();
  void allocate();
  void initialise(const ParamSlot& slot, const Tensor& weight) const;
  void initialise_from_scratch(const ParamSlot& slot, const Tensor& scratch);
  void initialise_all();
  void bind_all();
  bool main_is_whole(const Bucket& bucket) const;
  /// fp32 main weights of `run`, which lies in one bucket that is not split and is held here.
  Tensor main_of(std::size_t bucket, const FlatRun& run) const;
  /// The same of any bucket, as they lie.
  StateValues main_values(std::size_t bucket, const FlatRun& run) const;
  Tensor gradient_of(std::size_t bucket, const FlatRun& run) const;
  Tensor view(const Tensor& buffer, const ParamSlot& slot) const;
  Tensor gathered(const ParamSlot& slot, const Tensor& own) const;
  void wait_for_weights(std::size_t bucket) const;
  std::vector<Cut> cuts(PieceSet set) const;
  void add_to_sum(float factor, float beta);
  void sum_up();
  void clear_contributions();
  void make_reduction();
  void note_gradients();

  ExecCtx ctx_;
  ParamStoreOptions options_;
  std::vector<Parameter*> parameters_;
  FlatLayout layout_;
  std::vector<bool> frozen_;        // by slot
  std::vector<bool> has_gradient_;  // by slot: trained in a finished call
  int data_rank_ = 0, data_ranks_ = 1;
  bool sharded_ = false;
  std::vector<Owned> owned_;      // by bucket
  std::int64_t state_numel_ = 0;  // of a buffer made by zeros()
  std::int64_t main_numel_ = 0, low_numel_ = 0;
  Tensor main_, low_, model_, grad_;
  std::unique_ptr<GradientReduction> reduction_;
  mutable std::vector<Gather> gathers_;  // by bucket
  mutable int gathers_running_ = 0;
  Tensor sum_;                // of all calls but the first while that is the only one; laid out as zeros()
  double bucket_factor_ = 1;  // of the only call, whose gradient is still in grad_
  bool summed_ = false;       // the gradient is in sum_, not in grad_
  bool open_ = true;
  bool closed_ = false;  // a call's sum is in grad_, and nobody has said its factor
  int finished_calls_ = 0;
  std::int64_t gradient_version_ = 0;
};

}  // namespace tessera
