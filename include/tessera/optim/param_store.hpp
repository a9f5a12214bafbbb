#pragma once
/// ParamStore: gives parameters their memory, in a few flat buffers that one kernel call can walk over, and
/// moves what data, tensor and pipeline ranks share of it: gradients to their sums, new weights back.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/optim/gradient.hpp"
#include "tessera/optim/weight_walk.hpp"
#include "tessera/optim/weights.hpp"

namespace tessera {

/// The ranks over which gradients are summed; null = this rank alone. They outlive the store.
struct StoreGroups {
  Communicator* data = nullptr;       ///< hold the same parameters, see other samples
  Communicator* copies = nullptr;     ///< hold the shares that this rank does, in other groups like `data`
  Communicator* gathering = nullptr;  ///< the same ranks, for weights beside gradients; null = `data`
  DataRanks experts = {};             ///< for ParameterTraits::expert, which other ranks do not hold
  Communicator* tensor = nullptr;     ///< for ParameterTraits::partial_over_tensor
  Communicator* embedding = nullptr;  ///< for ParameterTraits::tied
  Communicator* world = nullptr;      ///< for the global norm: contains all of the others
  /// In what gradients are sent over `data` and `copies`: f32, bf16 or f16. They are rounded to it, and their
  /// sum once more; what is added up over micro-batches and calls is fp32.
  DType sent = DType::f32;
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
  /// A row of ShardPolicy. 0: every data rank updates everything; 1: each updates its share of every bucket,
  /// then weights are gathered; 2: and has only that share of the gradient; 3: and of weights, which are
  /// gathered for each use.
  int zero_stage = 0;
  /// What lies in buckets of its own: LayoutOptions::units. Null = nothing.
  std::function<int(const Parameter&)> unit = {};
  /// A bucket closes once it holds so many elements; 0 = max(40e6, 1e6 * data ranks), as in Megatron.
  std::int64_t bucket_elements = 0;
  /// Parameters that are not trained, alike on all ranks (Parameter::trained): backward computes no gradient
  /// of them, and what is stored as one is zero.
  std::function<bool(const Parameter&)> frozen = {};
  /// What lies outside the device's memory. Gradients need zero_stage 2, parameters 3, which then are stages
  /// of one rank too.
  OffloadConfig offload = {};
};

/// Weights, gradients and what optimizers keep beside them, all laid out alike (FlatLayout) and shared among
/// data ranks as Shards says; the gaps between parameters are zero and stay zero.
///
/// With several data ranks (groups.data) a call's gradients are summed over them, and with zero_stage 1 only
/// this rank's share of each bucket is: it alone has optimizer state, and with a copy it alone has main
/// weights, except where kernels read these. So persistent bytes per parameter, the optimizer's two moments
/// included, are 16 in fp32 and 18 in bf16 or f16, sharded over d ranks 8 + 8/d and 6 + 12/d (10 + 8/d for
/// ParameterTraits::reads_main). Split they are 16, and 6 + 10/d.
class ParamStore {
 public:
  static constexpr std::int64_t kAlignment = FlatLayout::kAlignment;

  /// Allocates, initialises every parameter and binds it. Collective over groups.tensor if that has several
  /// ranks. Errors: InvalidArgument for null or empty parameters, a name used twice, a compute dtype other
  /// than f32, bf16 and f16, split_main with one other than bf16, a zero_stage above 3, offload without the
  /// stage it needs, or groups without a world; those of OffloadedBuffer.
  ParamStore(const ExecCtx& ctx, std::vector<Parameter*> parameters, const ParamStoreOptions& options = {});
  ParamStore(const ParamStore&) = delete;
  ParamStore& operator=(const ParamStore&) = delete;

  /// In the order they were registered.
  const std::vector<Parameter*>& parameters() const { return parameters_; }
  const FlatLayout& layout() const { return layout_; }
  /// In the order they lie in memory.
  const std::vector<ParamSlot>& slots() const { return layout_.slots(); }
  /// Elements of each flat buffer, gaps included.
  std::int64_t numel() const { return layout_.numel(); }
  /// `frozen` is what it was at first: see frozen().
  const ParamStoreOptions& options() const { return options_; }
  const Shards& shards() const { return shards_; }
  Weights& weights() { return *weights_; }
  const Weights& weights() const { return *weights_; }
  WeightWalk& walk() { return *walk_; }
  /// Where offloaded numbers are; null without.
  const std::shared_ptr<OffloadPlace>& place() const { return place_; }
  GradientAccumulator& gradient() { return *gradient_; }
  const GradientAccumulator& gradient() const { return *gradient_; }
  /// Bytes of the buffers held at present. The optimizer's own are not among them.
  std::size_t persistent_bytes() const {
    return weights_->persistent_bytes() + gradient_->persistent_bytes();
  }

  /// Whether the parameter is frozen. Errors: InvalidArgument if it is not here.
  bool frozen(const Parameter& parameter) const { return frozen_[layout_.index_of(parameter)]; }
  /// What is frozen from the next call on, alike on all ranks, in place of ParamStoreOptions::frozen.
  /// Finished calls keep the gradients they gave; tapes recorded before must not run any more. Errors:
  /// InvalidArgument between close_call and what follows it.
  void set_frozen(const std::function<bool(const Parameter&)>& frozen);

  /// The parameter's part of a buffer of numel() elements with this store's layout, in the parameter's shape.
  Tensor view(const Tensor& buffer, const Parameter& parameter) const;
  /// A new zeroed fp32 buffer for optimizer state: numel() elements, or the shares of this rank one after the
  /// other.
  Tensor zeros() const;
  /// What an update of elements `run` reads and writes; they lie inside shards().updated(bucket) or, where
  /// the store is neither sharded nor split, anywhere behind the bucket's begin. `state`: where they lie in a
  /// buffer made by zeros().
  struct Slice {
    Tensor gradient;
    ops::MainWeights weights;
    Range state;
  };
  Slice slice(std::size_t bucket, const Range& run) const;

  /// Elements of the parameter that this rank counts in norms and saves, before they are divided among data
  /// ranks: none of a copy that another stage counts, replicated ones on tensor rank 0, runs of which several
  /// tensor ranks have copies on the first of these.
  std::vector<Range> counted(const Parameter& parameter) const;
  /// Pieces of main weights ("param"), in registration order.
  std::vector<StatePiece> pieces(PieceSet set) const;
  /// Pieces of the gradient an update would take ("grad"), still to be multiplied by gradient().scale().
  std::vector<StatePiece> gradient_pieces(PieceSet set) const;
  /// Pieces of state that is laid out like zeros().
  std::vector<StatePiece> pieces(PieceSet set, const std::string& kind, const StateValues& state) const;

 private:
  std::vector<std::int64_t> capacities() const;
  void bind_all();
  struct PieceRun {
    const ParamSlot* slot;
    Range run;  // of the store
  };
  /// `of`: which of a policy's columns says who holds it.
  std::vector<PieceRun> piece_runs(PieceSet set, Held ShardPolicy::*of) const;
  std::vector<PieceRun> owned_runs(Held ShardPolicy::*of) const;
  using Values = std::function<StateValues(std::size_t bucket, const Range& run)>;
  std::vector<StatePiece> pieces_of(const std::vector<PieceRun>& runs, const std::string& kind,
                                    const Values& values) const;

  ExecCtx ctx_;
  ParamStoreOptions options_;
  std::vector<Parameter*> parameters_;
  FlatLayout layout_;
  Shards shards_;
  std::vector<bool> frozen_;  // by slot
  std::shared_ptr<OffloadPlace> place_;
  std::optional<Weights> weights_;
  std::optional<WeightWalk> walk_;
  std::optional<GradientAccumulator> gradient_;
};

}  // namespace tessera
