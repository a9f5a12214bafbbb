#include "tessera/device/host_link.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "device/cuda.hpp"
#include "tessera/base/error.hpp"

namespace tessera {
namespace {

constexpr std::size_t kSmallPage = 4096, kLargePage = std::size_t{2} << 20;

std::shared_ptr<Stream> stream_beside(const ExecCtx& ctx) {
  if (ctx.device().is_cpu()) return std::make_shared<Stream>(1, Stream::Mode::queued);
  return std::make_shared<Stream>(ctx.device(), Stream::Priority::high);
}

/// Zeros, in large pages where it is large: disks send small ones several times as slowly.
std::shared_ptr<void> mapped(std::size_t bytes) {
  const std::size_t page = bytes < kLargePage ? kSmallPage : kLargePage;
  const std::size_t whole = std::max<std::size_t>(1, (bytes + page - 1) / page) * page;
  void* const raw = mmap(nullptr, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  const auto begin = reinterpret_cast<std::uintptr_t>(raw), aligned = (begin + page - 1) / page * page;
  if (aligned > begin) munmap(raw, aligned - begin);
  const std::uintptr_t end = aligned + whole, mapped_end = begin + whole + page;
  if (mapped_end > end) munmap(reinterpret_cast<void*>(end), mapped_end - end);
  if (page == kLargePage) madvise(reinterpret_cast<void*>(aligned), whole, MADV_HUGEPAGE);
  return {reinterpret_cast<void*>(aligned), [whole](void* p) { munmap(p, whole); }};
}

}  // namespace

HostLink::HostLink(const ExecCtx& ctx, bool pinned)
    : ctx_(ctx), incoming_(ctx), outgoing_(stream_beside(ctx)), pinned_(pinned && ctx.device().is_cuda()) {
  incoming_.stream = stream_beside(ctx);
}

HostLink::~HostLink() {
  try {
    synchronize();
  } catch (const std::exception&) {
    // Whoever waits for what is copied hears of it there.
  }
}

std::shared_ptr<void> HostLink::memory(std::size_t bytes, const std::string& what) const {
  if (ctx_.device().is_meta()) return nullptr;
  if (!pinned_) return host_memory(bytes, what);
  ctx_.stream->make_current();
  void* const memory = cuda::allocate_pinned(bytes);
  TESSERA_ENSURE(IoError, memory != nullptr, what, ": the system has no ", bytes,
                 " bytes of pinned host memory left (ulimit -l, the container's limit): offload.pin_memory: "
                 "false takes memory that is not pinned, and slower copies");
  std::memset(memory, 0, bytes);
  return {memory, cuda::deallocate_pinned};
}

std::shared_ptr<void> HostLink::host_memory(std::size_t bytes, const std::string& what) {
  std::shared_ptr<void> memory = mapped(bytes);
  TESSERA_ENSURE(IoError, memory, what, ": the system has no ", bytes, " bytes of host memory left");
  return memory;
}

Event HostLink::to_device(void* target, const void* source, std::size_t bytes) {
  Event given, there;
  ctx_.stream->record(given);
  incoming_.stream->wait(given);
  incoming_.stream->wait(left_);
  incoming_.stream->copy(target, source, bytes);
  incoming_.stream->record(there);
  to_device_ += bytes;
  return there;
}

Event HostLink::to_host(void* target, const void* source, std::size_t bytes, const Event& free) {
  Event given;
  ctx_.stream->record(given);
  outgoing_->wait(given);
  outgoing_->wait(free);
  outgoing_->copy(target, source, bytes);
  outgoing_->record(left_);
  to_host_ += bytes;
  return left_;
}

void HostLink::synchronize() {
  incoming_.stream->synchronize();
  outgoing_->synchronize();
}

}  // namespace tessera
