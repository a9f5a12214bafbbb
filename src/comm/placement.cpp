#include "tessera/comm/placement.hpp"

#include <algorithm>

namespace tessera {
namespace {

/// Appends boxes that cover the flat range [begin, end) of the box `shape` at dimensions >= `dim`, all
/// coordinates before it fixed in `corner`: a partial first slice, whole slices, a partial last one.
void cover(const Shape& shape, int dim, std::int64_t begin, std::int64_t end, Shape corner,
           std::vector<std::pair<Shape, Shape>>& boxes) {
  if (begin >= end) return;
  Shape extent = shape;
  for (int i = 0; i < dim; ++i) extent[i] = 1;
  if (dim >= shape.rank()) {
    boxes.emplace_back(corner, extent);
    return;
  }
  std::int64_t slice = 1;  // elements of one step along dim
  for (int i = dim + 1; i < shape.rank(); ++i) slice *= shape[i];
  std::int64_t first = begin / slice;
  const std::int64_t last = end / slice;
  const auto partial = [&](std::int64_t step, std::int64_t from, std::int64_t to) {
    Shape inner = corner;
    inner[dim] = step;
    cover(shape, dim + 1, from, to, inner, boxes);
  };
  if (first == last) return partial(first, begin - first * slice, end - first * slice);
  if (begin % slice != 0) {
    partial(first, begin % slice, slice);
    ++first;
  }
  if (first < last) {
    corner[dim] = first;
    extent[dim] = last - first;
    boxes.emplace_back(corner, extent);
  }
  if (end % slice != 0) partial(last, 0, end % slice);
}

}  // namespace

Part part_of(std::int64_t n, int rank, int size) {
  TESSERA_CHECK(n >= 0 && size >= 1 && rank >= 0 && rank < size, "part ", rank, " of ", size, " of ", n,
                " rows");
  const std::int64_t base = n / size, longer = n % size;
  return {rank * base + std::min<std::int64_t>(rank, longer), base + (rank < longer ? 1 : 0)};
}

Placement Placement::replicated(const Shape& global) {
  Placement placement;
  placement.global_ = placement.local_ = global;
  return placement;
}

Placement Placement::split(const Shape& global, int dim, int rank, int size) {
  const Part part = part_of(global[dim], rank, size);
  Placement placement = segmented(global, dim, {{.local = 0, .global = part.begin, .count = part.count}});
  Shape first = global;
  first[dim] = part_of(global[dim], 0, size).count;
  placement.largest_ = first.numel();
  return placement;
}

Placement Placement::segmented(const Shape& global, int dim, std::vector<Segment> segments) {
  Placement placement = replicated(global);
  placement.dim_ = dim;
  std::int64_t local = 0;
  for (const Segment& s : segments) {
    TESSERA_CHECK(s.local == local && s.global >= 0 && s.count >= 0 && s.global + s.count <= global[dim] &&
                      s.copies >= 1 && s.copy >= 0 && s.copy < s.copies,
                  "segment of ", s.count, " at ", s.local, " (global ", s.global, ", copy ", s.copy, " of ",
                  s.copies, ") in dimension ", dim, " of ", global);
    local += s.count;
  }
  placement.local_[dim] = local;
  placement.segments_ = std::move(segments);
  return placement;
}

std::vector<Placed> Placement::boxes(std::int64_t begin, std::int64_t end) const {
  TESSERA_CHECK(begin >= 0 && begin <= end && end <= local_.numel(), "elements [", begin, ", ", end, ") of ",
                local_);
  std::vector<std::pair<Shape, Shape>> flat;
  Shape corner = local_;
  for (int i = 0; i < corner.rank(); ++i) corner[i] = 0;
  cover(local_, 0, begin, end, corner, flat);
  std::vector<Placed> placed;
  for (const auto& [offset, extent] : flat) {
    if (dim_ < 0) {
      placed.push_back({offset, offset, extent});
      continue;
    }
    for (const Segment& s : segments_) {
      const std::int64_t from = std::max(offset[dim_], s.local);
      const std::int64_t to = std::min(offset[dim_] + extent[dim_], s.local + s.count);
      if (from >= to) continue;
      Placed box{offset, offset, extent};
      box.local[dim_] = from;
      box.global[dim_] = from - s.local + s.global;
      box.shape[dim_] = to - from;
      placed.push_back(box);
    }
  }
  return placed;
}

}  // namespace tessera
