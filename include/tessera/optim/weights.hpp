#pragma once
/// Weights: the memory of a ParamStore's weights, and their way from the rank that updated them to those that
/// read them.

#include <functional>
#include <vector>

#include "tessera/ops/optimizer.hpp"
#include "tessera/optim/offloaded_buffer.hpp"
#include "tessera/optim/shards.hpp"
#include "tessera/optim/state_piece.hpp"

namespace tessera {

/// fp32 main weights and, in bf16 and f16, the copy that kernels read: flat buffers laid out alike, whole or
/// in shares as each bucket's ShardPolicy says. Split, the low 16 bits of main weights stand in their place,
/// except for ParameterTraits::reads_main. What an OffloadPlace asks for lies outside the device: main
/// weights that no kernel reads, and with offload.parameters the shares of what kernels read.
///
/// After an update the shares are gathered while the next pass begins: everything here that gives access to
/// weights waits for that, and so does Parameter::value().
class Weights {
 public:
  struct Options {
    DType compute = DType::f32;
    bool split_main = false;
    std::shared_ptr<OffloadPlace> place = nullptr;  ///< null: all is on the device
  };
  /// Allocates zeros. `layout` and `shards` are kept by reference.
  Weights(const ExecCtx& ctx, const FlatLayout& layout, const Shards& shards, const Options& options);
  ~Weights();
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;

  /// Gives every parameter its first value by its Init: normal numbers keyed by (ctx.seed, name, global
  /// element), so that every layout draws the same. `scratch`: numel() zeros to compute in where a rank does
  /// not keep a parameter in fp32, zero again afterwards; may be undefined.
  void initialise(const Tensor& scratch);

  /// Whether the main weights of a bucket are split.
  bool splits(const Bucket& bucket) const { return options_.split_main && !bucket.reads_main; }
  /// What kernels read of a parameter, in its shape, and its fp32 main weights; undefined where this rank
  /// holds only a share of them, or they are split.
  struct Views {
    Tensor value, main;
  };
  Views views(const ParamSlot& slot) const;
  /// fp32 [numel], or undefined when this rank holds only shares of it (a copy, sharded) or splits some.
  Tensor main_buffer() const;
  /// In the compute dtype, what this rank holds of what kernels read: [numel], or with ShardPolicy::model its
  /// shares one after the other; undefined when kernels read the main weights.
  const Tensor& model_buffer() const;
  /// The fp32 main weight, in the parameter's shape. Errors: InvalidArgument if the parameter is not here,
  /// this rank holds only a share of it, or it is split.
  Tensor main(const Parameter& parameter) const;
  /// Main weights in fp32 in the parameter's shape, whole on every data rank: a view, or where needed a copy
  /// that was gathered or joined. Collective over the data ranks.
  Tensor whole(const Parameter& parameter) const;
  /// Main weights of `run`, which lies in one bucket and is held here, as they lie.
  StateValues values(std::size_t bucket, const Range& run) const;
  /// Outside the device, laid out like state (Shards::in_state): main weights, or what kernels read; null.
  const std::shared_ptr<OffloadedBuffer>& main_away() const { return main_away_; }
  const std::shared_ptr<OffloadedBuffer>& model_away() const { return model_away_; }
  /// Whether those of a bucket lie there.
  bool main_is_away(std::size_t bucket) const;
  bool model_is_away(std::size_t bucket) const;
  /// What an update of `run` writes: `model` is undefined where nothing is to be rounded, and so is what is
  /// away.
  ops::MainWeights target(std::size_t bucket, const Range& run) const;

  /// Rounds the main weights this rank holds into what kernels read; needed after main weights were written
  /// by hand. No-op for f32, and for split weights, which are what kernels read.
  void refresh_copy();
  /// After main weights were written, on every rank those of PieceSet::held: brings them to all data ranks
  /// and into what kernels read. Collective over the data ranks if sharded.
  void gather();
  /// Bucket `bucket` was updated in this rank's share: starts to gather it; its parameters wait for that
  /// before they are read next. Every data rank calls this for the same buckets in the same order. No-op
  /// unless sharded.
  void spread(std::size_t bucket);
  /// Of weights that are held as shares: those of a bucket begin to come together. Every data rank calls this
  /// for the same buckets in the same order.
  void fetch(std::size_t bucket);
  /// Their parameters have them from here on, until release().
  void arrive(std::size_t bucket);
  /// Reading them calls `gate` from here on, which must make them arrive.
  void release(std::size_t bucket, const std::function<void()>& gate);
  /// Bytes of weights that are together at present.
  std::size_t gathered_bytes() const;
  bool fetched(std::size_t bucket) const { return whole_[bucket].here; }
  /// Waits for all that is under way.
  void wait() const;
  /// Whether some are still on their way: wait() would hold the stream up.
  bool coming() const;
  /// Of the device's memory.
  std::size_t persistent_bytes() const;

 private:
  struct Gather {
    Pending pending;
    bool running = false;
  };

  /// Weights of a bucket that were brought together.
  struct Whole {
    Tensor main, model;
    Event copied;  ///< this rank's share from where it is offloaded
    Pending pending;
    bool here = false;

    void wait(const ExecCtx& ctx) const {
      ctx.stream->wait(copied);
      pending.wait(ctx);
    }
  };

  bool main_is_whole(std::size_t bucket) const { return shards_.policy(bucket).main == Held::whole; }
  bool model_is_whole(std::size_t bucket) const { return shards_.policy(bucket).model == Held::whole; }
  /// Whether this rank keeps some of the copy that kernels read. Where these read the main weights and all
  /// are shares, the copy is made of what was gathered.
  bool has_copy(std::size_t bucket) const;
  Tensor model_of(std::size_t bucket, const Range& run) const;
  bool in_place(std::size_t bucket) const;
  void draw(const ParamSlot& slot, const Tensor& weight) const;
  void draw_in(const ParamSlot& slot, const Tensor& scratch);
  Tensor main_of(std::size_t bucket, const Range& run) const;
  /// In fp32 on the device, wherever they lie: a view where they lie there as such, else a copy.
  Tensor read_main(std::size_t bucket, const Range& run) const;
  void make_away();
  void round(std::size_t bucket, const Range& run);
  void wait(std::size_t bucket) const;

  ExecCtx ctx_;
  const FlatLayout& layout_;
  const Shards& shards_;
  Options options_;
  // By bucket: where its updated() begins in main_, or low_ if it is split.
  std::vector<std::int64_t> main_at_;
  std::vector<std::int64_t> model_at_;  // the same of what is held of the copy
  std::vector<Whole> whole_;            // by bucket
  Tensor main_, low_, model_;
  std::shared_ptr<OffloadedBuffer> main_away_, model_away_;
  mutable std::vector<Gather> gathers_;  // by bucket
  mutable int gathers_running_ = 0;
};

}  // namespace tessera
