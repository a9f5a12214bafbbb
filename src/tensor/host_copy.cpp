#include "tessera/tensor/host_copy.hpp"

namespace tessera {

HostCopy::HostCopy(const ExecCtx& ctx, const Tensor& source) {
  if (!source) return;
  TESSERA_CHECK(source.is_contiguous(), "host copies need a contiguous tensor, strides are ",
                source.strides());
  bytes_ = source.nbytes();
  memory_ = ctx.allocator->host_memory(bytes_);
  ctx.stream->copy(memory_.get(), source.raw(), bytes_);
  ctx.stream->record(arrived_);
}

}  // namespace tessera
