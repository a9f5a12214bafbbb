#pragma once
/// What each operation is in calls of NCCL.

#include "comm/nccl/lane.hpp"

namespace tessera::nccl_calls {

using Counts = std::vector<std::int64_t>;

/// Errors: InternalError for types that cannot be reduced.
ncclDataType_t type_of(DType dtype);

/// Blocks are in elements, one per rank; all alike take NCCL's own collective, others one call per block.
NcclLane::Work all_reduce(const Tensor& x, ReduceOp op);
NcclLane::Work reduce_scatter(const Tensor& in, const Tensor& out, const Counts& counts, ReduceOp op,
                              int rank);
NcclLane::Work all_gather(const Tensor& in, const Tensor& out, const Counts& counts, int rank);
NcclLane::Work broadcast(const Tensor& x, int root);
NcclLane::Work all_to_all(const Tensor& in, const Tensor& out, const Counts& send_counts,
                          const Counts& recv_counts, int rank);
/// One message on a lane of two: rank 0 sends, rank 1 receives.
NcclLane::Work message(const Transfer& transfer);

}  // namespace tessera::nccl_calls
