#pragma once
/// Placement: where a rank's part of a weight lies in the whole. Read by initialisation, checkpoints, norms
/// and the sums of replicated gradients.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tessera/base/range.hpp"
#include "tessera/base/shape.hpp"

namespace tessera {

/// A run of local rows (or columns) and where it lies in the whole tensor.
struct Segment {
  std::int64_t local = 0, global = 0, count = 0;
  /// So many neighbouring tp ranks hold this run (key-value heads when tp is larger than their number); this
  /// is number `copy` of them. Each computes a part of its gradient; the parts are summed.
  int copies = 1, copy = 0;
  friend bool operator==(const Segment&, const Segment&) = default;
};

/// A box of a tensor and the local box it is: same shape, two offsets.
struct Placed {
  Shape local, global, shape;
};

class Placement {
 public:
  Placement() = default;
  /// Every rank holds the whole tensor.
  static Placement replicated(const Shape& global);
  /// Rank `rank` of `size` holds one run of dimension `dim`: as even as possible, longer runs first.
  static Placement split(const Shape& global, int dim, int rank, int size);
  /// Runs of dimension `dim`, one after the other.
  static Placement segmented(const Shape& global, int dim, std::vector<Segment> segments);

  const Shape& global() const { return global_; }
  const Shape& local() const { return local_; }
  /// Elements of the largest part of this weight on any rank, as far as its own part says: split() knows.
  std::int64_t largest() const { return std::max(largest_, local_.numel()); }
  bool is_replicated() const { return dim_ < 0; }
  /// The split dimension, -1 when replicated.
  int dim() const { return dim_; }
  /// Empty when replicated.
  const std::vector<Segment>& segments() const { return segments_; }

  /// The boxes that cover local elements [begin, end) in row-major order (a flat range need not be a box: up
  /// to three per segment and level).
  std::vector<Placed> boxes(std::int64_t begin, std::int64_t end) const;
  std::vector<Placed> boxes() const { return boxes(0, local_.numel()); }

 private:
  Shape global_, local_;
  int dim_ = -1;
  std::int64_t largest_ = 0;  ///< elements
  std::vector<Segment> segments_;
};

using Part = Range;
/// Part `rank` of `size` of `n` rows: as even as possible, longer parts first.
Part part_of(std::int64_t n, int rank, int size);

}  // namespace tessera
