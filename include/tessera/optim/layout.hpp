#pragma once
/// FlatLayout: where parameters lie in a ParamStore's flat buffers, and how these are cut into buckets. A
/// pure function of the declared parameters: what a rank holds and sends can be counted without any memory.

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "tessera/autograd/parameter.hpp"
#include "tessera/base/range.hpp"

namespace tessera {

/// Where a parameter lies in every flat buffer, in elements.
struct ParamSlot {
  Parameter* parameter = nullptr;
  std::int64_t offset = 0;
  std::int64_t numel = 0;
  std::size_t bucket = 0;

  Range run() const { return {offset, numel}; }
};

/// Neighbours in the flat buffers whose gradients are reduced, and whose weights are gathered, in one
/// operation. A bucket is as many equal shares as it has data ranks; rank r updates share r.
struct Bucket {
  std::int64_t begin = 0, count = 0;
  std::size_t first_slot = 0, slots = 0;
  /// Every rank keeps all its fp32 main weights: kernels read them.
  bool reads_main = false;
  /// Holds one tied parameter, so that it is laid out alike on both stages.
  bool tied = false;
  /// Holds experts, which have data ranks of their own.
  bool experts = false;

  Range run() const { return {begin, count}; }
  Range share(int rank, int ranks) const { return {begin + count / ranks * rank, count / ranks}; }
};

struct LayoutOptions {
  int data_ranks = 1;  ///< a multiple of those of experts
  /// A bucket closes once it holds so many elements; 0 = max(40e6, 1e6 * data_ranks), as in Megatron.
  std::int64_t bucket_elements = 0;
  /// Elements to set aside for each parameter, in registration order; empty = as many as it has. Tensor ranks
  /// whose parts differ in size set aside the largest, so that all lie alike.
  std::span<const std::int64_t> capacities = {};
  /// A number for each parameter, in registration order: a bucket holds parameters of one number only; empty
  /// = all may be together.
  std::span<const int> units = {};
};

/// Parameters go in reverse order of registration (the order in which backward finishes them) into the open
/// bucket of their kind: those whose fp32 weights kernels read, and experts, apart from the others, each tied
/// one alone.
/// Starts are multiples of kAlignment, buckets of kAlignment * data_ranks. Buckets follow each other in the
/// order in which backward completes them.
class FlatLayout {
 public:
  static constexpr std::int64_t kAlignment = 64;

  FlatLayout() = default;
  /// Errors: InvalidArgument for null or empty parameters, a name used twice, or impossible options.
  FlatLayout(std::span<Parameter* const> parameters, const LayoutOptions& options);

  /// In the order they lie in memory.
  const std::vector<ParamSlot>& slots() const { return slots_; }
  const std::vector<Bucket>& buckets() const { return buckets_; }
  /// The slots of one bucket.
  std::span<const ParamSlot> slots_of(const Bucket& bucket) const {
    return std::span(slots_).subspan(bucket.first_slot, bucket.slots);
  }
  /// Elements in all, gaps included.
  std::int64_t numel() const { return numel_; }
  /// Position in slots(). Errors: InvalidArgument for a parameter that is not here.
  std::size_t index_of(const Parameter& parameter) const;
  const ParamSlot& slot_of(const Parameter& parameter) const { return slots_[index_of(parameter)]; }

 private:
  std::vector<ParamSlot> slots_;
  std::vector<Bucket> buckets_;
  std::unordered_map<const Parameter*, std::size_t> index_;
  std::int64_t numel_ = 0;
};

}  // namespace tessera
