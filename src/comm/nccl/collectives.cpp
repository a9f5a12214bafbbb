#include "comm/nccl/collectives.hpp"

#include <algorithm>

#include "tessera/base/error.hpp"

// The work holds addresses, not tensors: what keeps the memory is the task.

namespace tessera::nccl_calls {
namespace {

std::size_t unsigned_of(std::int64_t count) { return static_cast<std::size_t>(count); }

bool all_alike(const Counts& counts) {
  return std::all_of(counts.begin(), counts.end(), [&](auto count) { return count == counts.front(); });
}

ncclRedOp_t op_of(ReduceOp op) { return op == ReduceOp::sum ? ncclSum : ncclMax; }

std::byte* bytes_of(const Tensor& tensor) { return static_cast<std::byte*>(tensor.raw()); }

}  // namespace

ncclDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return ncclFloat32;
    case DType::bf16:
      return ncclBfloat16;
    case DType::f16:
      return ncclFloat16;
    case DType::f64:
      return ncclFloat64;
    case DType::i32:
      return ncclInt32;
    case DType::i64:
      return ncclInt64;
    default:
      throw InternalError(detail::concat(dtype, " cannot be reduced"));
  }
}

NcclLane::Work all_reduce(const Tensor& x, ReduceOp op) {
  return [data = x.raw(), count = unsigned_of(x.numel()), type = type_of(x.dtype()),
          op = op_of(op)](NcclCalls& calls) {
    calls.add(ncclAllReduce(data, data, count, type, op, calls.comm, calls.native()), "ncclAllReduce");
  };
}

NcclLane::Work reduce_scatter(const Tensor& in, const Tensor& out, const Counts& counts, ReduceOp op,
                              int rank) {
  const auto type = type_of(in.dtype());
  if (all_alike(counts)) {
    return [source = in.raw(), target = out.raw(), count = unsigned_of(out.numel()), type,
            op = op_of(op)](NcclCalls& calls) {
      calls.add(ncclReduceScatter(source, target, count, type, op, calls.comm, calls.native()),
                "ncclReduceScatter");
    };
  }
  return [source = bytes_of(in), target = bytes_of(out), size = size_of(in.dtype()), counts, type, rank,
          op = op_of(op)](NcclCalls& calls) {
    const std::byte* block = source;
    for (int r = 0; r < static_cast<int>(counts.size()); ++r) {
      const std::size_t count = unsigned_of(counts[unsigned_of(r)]);
      if (count > 0) {
        calls.add(
            ncclReduce(block, r == rank ? target : nullptr, count, type, op, r, calls.comm, calls.native()),
            "ncclReduce");
      }
      block += count * size;
    }
  };
}

NcclLane::Work all_gather(const Tensor& in, const Tensor& out, const Counts& counts, int rank) {
  if (all_alike(counts)) {
    return [source = in.raw(), target = out.raw(), bytes = in.nbytes()](NcclCalls& calls) {
      calls.add(ncclAllGather(source, target, bytes, ncclUint8, calls.comm, calls.native()), "ncclAllGather");
    };
  }
  return [source = bytes_of(in), target = bytes_of(out), size = size_of(in.dtype()), counts,
          rank](NcclCalls& calls) {
    std::byte* block = target;
    for (int r = 0; r < static_cast<int>(counts.size()); ++r) {
      const std::size_t bytes = unsigned_of(counts[unsigned_of(r)]) * size;
      if (bytes > 0) {
        const std::byte* own = r == rank ? source : block;
        calls.add(ncclBroadcast(own, block, bytes, ncclUint8, r, calls.comm, calls.native()),
                  "ncclBroadcast");
      }
      block += bytes;
    }
  };
}

NcclLane::Work broadcast(const Tensor& x, int root) {
  return [data = x.raw(), bytes = x.nbytes(), root](NcclCalls& calls) {
    calls.add(ncclBroadcast(data, data, bytes, ncclUint8, root, calls.comm, calls.native()), "ncclBroadcast");
  };
}

NcclLane::Work all_to_all(const Tensor& in, const Tensor& out, const Counts& send_counts,
                          const Counts& recv_counts, int rank) {
  return [source = bytes_of(in), target = bytes_of(out), size = size_of(in.dtype()), send_counts, recv_counts,
          rank](NcclCalls& calls) {
    std::byte *from = source, *to = target;
    for (int r = 0; r < static_cast<int>(send_counts.size()); ++r) {
      const std::size_t sent = unsigned_of(send_counts[unsigned_of(r)]) * size;
      const std::size_t received = unsigned_of(recv_counts[unsigned_of(r)]) * size;
      if (r == rank) {
        calls.stream.copy(to, from, sent);
      } else {
        if (sent > 0) calls.add(ncclSend(from, sent, ncclUint8, r, calls.comm, calls.native()), "ncclSend");
        if (received > 0)
          calls.add(ncclRecv(to, received, ncclUint8, r, calls.comm, calls.native()), "ncclRecv");
      }
      from += sent;
      to += received;
    }
  };
}

NcclLane::Work message(const Transfer& transfer) {
  return [data = transfer.tensor.raw(), bytes = transfer.tensor.nbytes(),
          sends = transfer.kind == Transfer::Kind::send](NcclCalls& calls) {
    if (sends) {
      calls.add(ncclSend(data, bytes, ncclUint8, 1, calls.comm, calls.native()), "ncclSend");
    } else {
      calls.add(ncclRecv(data, bytes, ncclUint8, 0, calls.comm, calls.native()), "ncclRecv");
    }
  };
}

}  // namespace tessera::nccl_calls
