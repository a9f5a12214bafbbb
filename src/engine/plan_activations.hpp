#pragma once
/// Bytes of activations and of messages between tensor ranks and stages, by formula: what the Functions of
/// autograd and parallel keep and send for one micro-batch. Changes there are changes here; tests compare.

#include <vector>

#include "tessera/engine/plan.hpp"

namespace tessera::detail {

/// Bytes a rank sends in the collectives of `size` ranks, as CommStats counts them.
struct Collective {
  int rank = 0, size = 1;
  std::int64_t all_reduce(std::int64_t elements, std::int64_t element_bytes) const;
  /// Of `elements` in all, a multiple of size; reduce-scatter and all-gather alike.
  std::int64_t part(std::int64_t elements, std::int64_t element_bytes) const;
};

class Activations {
 public:
  /// `config` is resolved.
  Activations(const Config& config, int tensor_rank);

  /// Held from F to B, per micro-batch.
  std::int64_t kept(const ModelPiece& piece) const;
  /// Held from B to W, where weight gradients are deferred.
  std::int64_t deferred(const ModelPiece& piece) const;
  /// The most that one operation of the piece, or one recomputed segment, needs besides.
  std::int64_t temporary(const ModelPiece& piece) const;
  /// Tokens, labels and positions of one micro-batch.
  std::int64_t batch() const { return 12 * rows_; }

  /// What one micro-batch through `piece` sends over the tensor ranks.
  void add_traffic(const ModelPiece& piece, std::int64_t micro_batches,
                   std::vector<TrafficTerm>& terms) const;

 private:
  /// How the layers of a piece are recomputed: in segments, of which the largest has so many layers, and the
  /// rest not at all.
  struct Segments {
    std::int64_t count = 0, largest = 0, layers = 0;
  };
  Segments segments(const ModelPiece& piece) const;
  std::int64_t layer_kept() const;
  std::int64_t layer_deferred() const;
  std::int64_t layer_temporary() const;
  std::int64_t head_temporary() const;
  std::int64_t segment_input() const;

  RecomputeOptions recompute_;
  Collective tensor_;
  bool sequence_ = false, swiglu_ = false;
  std::int64_t rows_ = 0, own_rows_ = 0;  // of a micro-batch; of the residual stream on this rank
  std::int64_t width_ = 0, query_ = 0, qkv_ = 0, heads_ = 0, ffn_ = 0, fc1_ = 0, vocab_ = 0;
  std::int64_t compute_ = 4, residual_ = 4;  // bytes per element
  std::int64_t stream_ = 0, stats_ = 0;      // bytes of the residual stream, of a norm's statistics
};

/// The most a stage holds while it walks its column; sizes by chunk.
std::int64_t peak_held(const std::vector<Action>& column, const std::vector<std::int64_t>& kept,
                       const std::vector<std::int64_t>& deferred);

/// Floating-point operations of a piece's passes per token and tensor rank.
PassTimes pass_times(const Config& config, const ModelPiece& piece);

}  // namespace tessera::detail
