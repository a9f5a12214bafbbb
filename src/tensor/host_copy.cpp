#include "tessera/tensor/host_copy.hpp"

#include <cstring>

namespace tessera {

HostCopy::HostCopy(const ExecCtx& ctx, const Tensor& source) {
  if (!source) return;
  device_ = source.device();
  TESSERA_CHECK(source.is_contiguous(), "host copies need a contiguous tensor, strides are ",
                source.strides());
  bytes_ = source.nbytes();
  if (device_.is_meta()) return;
  const std::shared_ptr<void> lent = ctx.allocator->host_memory(bytes_);
  ctx.stream->copy(lent.get(), source.raw(), bytes_);
  ctx.stream->record(arrived_);
  // A copy nobody waited for is still to be written when its last owner goes.
  memory_ = {lent.get(), [allocator = ctx.allocator, lent, arrived = arrived_](void*) {
               if (!arrived.done()) allocator->keep_host_memory(lent, arrived);
             }};
}

void HostCopy::read(void* to, std::size_t bytes, const Tensor::Where& where) const {
  detail::check_readable(device_, where);
  if (memory_ == nullptr) return;
  TESSERA_CHECK(bytes <= bytes_, "a copy of ", bytes_, " bytes has no value of ", bytes);
  arrived_.synchronize();
  std::memcpy(to, memory_.get(), bytes);
}

}  // namespace tessera
