/// Device memory: a reserved range of addresses, each allocation on pages of its own with forbidden pages
/// around. An allocation ends as near to its last page's end as its alignment allows; the rest of its pages
/// holds a pattern that is looked at when it is freed. New memory holds NaNs.

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <shared_mutex>

#include "graph.hpp"
#include "runtime.hpp"

namespace tessera_emulator {
namespace {

constexpr std::size_t kPage = 4096, kAlignment = 256;
constexpr std::size_t kReserved = std::size_t{256} << 30;
constexpr unsigned char kPoison = 0xff, kGuard = 0xa5;
constexpr std::size_t kPoisoned = std::size_t{4} << 20;  // bytes of the file of new memory

std::uintptr_t number(const void* address) { return reinterpret_cast<std::uintptr_t>(address); }
std::size_t round_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

[[noreturn]] void give_up(const char* what) {
  std::fprintf(stderr, "CUDA emulator: %s\n", what);
  std::exit(2);
}

/// A file full of kPoison. New memory is a private view of it: most of a segment that a small test allocates
/// is never written to, and then costs no pages.
int poison_file() {
  const int file = memfd_create("new device memory", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, kPoisoned) != 0) give_up("no file for new device memory");
  void* const view = mmap(nullptr, kPoisoned, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (view == MAP_FAILED) give_up("no memory for new device memory");
  std::memset(view, kPoison, kPoisoned);
  munmap(view, kPoisoned);
  return file;
}

struct Allocation {
  std::uintptr_t begin = 0, end = 0;    // what was asked for
  std::uintptr_t first = 0, after = 0;  // its pages
  int device = 0;
};

class DeviceMemory {
 public:
  DeviceMemory() {
    void* const range =
        mmap(nullptr, kReserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) give_up("no address space for device memory");
    base_ = next_ = number(range);
    const char* protect = std::getenv("TESSERA_EMULATOR_PROTECT");
    protected_ = protect != nullptr && std::strcmp(protect, "1") == 0;
  }

  bool contains(std::uintptr_t address) const { return address >= base_ && address < base_ + kReserved; }
  void* allocate(int device, std::size_t bytes);
  /// False when there is no such allocation.
  bool free(std::uintptr_t address);
  /// The allocation around an address; one of no bytes when there is none.
  Allocation find(std::uintptr_t address) const;
  std::size_t used(int device) const;
  void set_protection(bool on);
  void enter();
  void leave();

  /// Changes whenever an allocation comes or goes.
  std::atomic<std::uint64_t> generation{1};
  std::atomic<std::size_t> overruns{0};

 private:
  bool allowed() const { return !protected_ || users_ > 0; }
  void protect(const Allocation& it, bool allow) const {
    mprotect(reinterpret_cast<void*>(it.first), it.after - it.first,
             allow ? PROT_READ | PROT_WRITE : PROT_NONE);
  }
  std::uintptr_t take_pages(std::size_t bytes);
  void map_poison(const Allocation& it) const;
  static void unmap(const Allocation& it);
  void look_for_overruns(const Allocation& it);

  const int poison_ = poison_file();
  std::uintptr_t base_ = 0, next_ = 0;
  mutable std::shared_mutex mutex_;
  std::map<std::uintptr_t, Allocation> allocations_;  // by begin
  std::multimap<std::size_t, std::uintptr_t>
      given_back_;  // pages, used again only when no fresh ones are left
  std::map<int, std::size_t> used_;
  bool protected_ = false;
  int users_ = 0;
};

DeviceMemory& device_memory_of_process() {
  static DeviceMemory* const instance = new DeviceMemory;  // streams may be used while the process ends
  return *instance;
}

std::uintptr_t DeviceMemory::take_pages(std::size_t bytes) {
  if (next_ + bytes + kPage <= base_ + kReserved) {
    const std::uintptr_t pages = next_;
    next_ += bytes + kPage;  // the page after it stays forbidden
    return pages;
  }
  const auto found = given_back_.find(bytes);
  if (found == given_back_.end()) return 0;
  const std::uintptr_t pages = found->second;
  given_back_.erase(found);
  return pages;
}

void DeviceMemory::map_poison(const Allocation& it) const {
  for (std::uintptr_t at = it.first; at < it.after; at += kPoisoned) {
    if (mmap(reinterpret_cast<void*>(at), std::min<std::size_t>(kPoisoned, it.after - at),
             PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, poison_, 0) == MAP_FAILED)
      give_up("too many allocations");
  }
}

void DeviceMemory::unmap(const Allocation& it) {
  if (mmap(reinterpret_cast<void*>(it.first), it.after - it.first, PROT_NONE,
           MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) == MAP_FAILED)
    give_up("device memory cannot be given back");
}

void* DeviceMemory::allocate(int device, std::size_t bytes) {
  std::unique_lock lock(mutex_);
  if (bytes > device_memory() || used_[device] > device_memory() - bytes) return nullptr;
  Allocation it;
  const std::size_t size = round_up(std::max<std::size_t>(bytes, 1), kAlignment);
  it.first = take_pages(round_up(size, kPage));
  if (it.first == 0) return nullptr;
  it.after = it.first + round_up(size, kPage);
  it.begin = it.after - size;
  it.end = it.begin + bytes;
  it.device = device;
  map_poison(it);
  std::memset(reinterpret_cast<void*>(it.first), kGuard, it.begin - it.first);
  std::memset(reinterpret_cast<void*>(it.end), kGuard, it.after - it.end);
  if (!allowed()) protect(it, false);
  allocations_[it.begin] = it;
  used_[device] += bytes;
  ++generation;
  return reinterpret_cast<void*>(it.begin);
}

void DeviceMemory::look_for_overruns(const Allocation& it) {
  const auto clean = [](std::uintptr_t from, std::uintptr_t to) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(from);
    return std::all_of(bytes, bytes + (to - from), [](unsigned char byte) { return byte == kGuard; });
  };
  const bool before = !clean(it.first, it.begin), behind = !clean(it.end, it.after);
  if (!before && !behind) return;
  ++overruns;
  std::fprintf(stderr, "CUDA emulator: something wrote %s an allocation of %zu bytes on device %d\n",
               before ? "before" : "behind", static_cast<std::size_t>(it.end - it.begin), it.device);
}

bool DeviceMemory::free(std::uintptr_t address) {
  std::unique_lock lock(mutex_);
  const auto found = allocations_.find(address);
  if (found == allocations_.end()) return false;
  const Allocation it = found->second;
  protect(it, true);
  look_for_overruns(it);
  unmap(it);
  allocations_.erase(found);
  given_back_.emplace(it.after - it.first, it.first);
  used_[it.device] -= it.end - it.begin;
  ++generation;
  return true;
}

Allocation DeviceMemory::find(std::uintptr_t address) const {
  std::shared_lock lock(mutex_);
  auto found = allocations_.upper_bound(address);
  if (found == allocations_.begin()) return {};
  --found;
  return address < found->second.end ? found->second : Allocation{};
}

std::size_t DeviceMemory::used(int device) const {
  std::shared_lock lock(mutex_);
  const auto found = used_.find(device);
  return found == used_.end() ? 0 : found->second;
}

void DeviceMemory::set_protection(bool on) {
  std::unique_lock lock(mutex_);
  protected_ = on;
  for (const auto& [begin, it] : allocations_) protect(it, allowed());
}

void DeviceMemory::enter() {
  std::unique_lock lock(mutex_);
  if (users_++ > 0 || !protected_) return;
  for (const auto& [begin, it] : allocations_) protect(it, true);
}

void DeviceMemory::leave() {
  std::unique_lock lock(mutex_);
  if (--users_ > 0 || !protected_) return;
  for (const auto& [begin, it] : allocations_) protect(it, false);
}

/// Memory of cudaHostAlloc.
struct Pinned {
  std::mutex mutex;
  std::map<std::uintptr_t, std::size_t> sizes;
};
Pinned& pinned() {
  static Pinned* const instance = new Pinned;
  return *instance;
}

}  // namespace

void set_protection(bool on) { device_memory_of_process().set_protection(on); }
std::size_t pinned_bytes() {
  const std::lock_guard lock(pinned().mutex);
  std::size_t sum = 0;
  for (const auto& [address, bytes] : pinned().sizes) sum += bytes;
  return sum;
}
std::size_t overruns() { return device_memory_of_process().overruns; }

void check_access(const void* address, std::size_t bytes) {
  if (number(address) % bytes != 0) {
    throw Fault("an access of " + std::to_string(bytes) +
                " bytes at an address that is not a multiple of it");
  }
  DeviceMemory& memory = device_memory_of_process();
  if (!memory.contains(number(address))) return;
  // A kernel goes back and forth between a few allocations.
  struct Known {
    std::uint64_t generation = 0;
    std::array<Allocation, 8> allocations;
    std::size_t next = 0;
  };
  static thread_local Known known;
  const std::uint64_t generation = memory.generation.load(std::memory_order_relaxed);
  if (known.generation != generation) known = {generation, {}, 0};
  const auto inside = [&](const Allocation& it) {
    return number(address) >= it.begin && number(address) + bytes <= it.end;
  };
  for (const Allocation& it : known.allocations) {
    if (inside(it)) return;
  }
  const Allocation it = memory.find(number(address));
  if (!inside(it)) {
    throw Fault(
        "an access of " + std::to_string(bytes) + " bytes of device memory outside of any allocation" +
        (it.end == 0
             ? ""
             : ": it begins " + std::to_string(it.end - number(address)) + " bytes before the end of one"));
  }
  known.allocations[known.next++ % known.allocations.size()] = it;
}

namespace memory {

bool is_device(const void* address) { return device_memory_of_process().contains(number(address)); }
int device_of(const void* address) {
  const Allocation it = device_memory_of_process().find(number(address));
  return it.end == 0 ? -1 : it.device;
}
bool is_pinned(const void* address, std::size_t bytes) {
  std::lock_guard lock(pinned().mutex);
  auto found = pinned().sizes.upper_bound(number(address));
  if (found == pinned().sizes.begin()) return false;
  --found;
  return number(address) + bytes <= found->first + found->second;
}
std::string why_not(const void* address, std::size_t bytes) {
  if (!is_device(address)) return "";
  const Allocation it = device_memory_of_process().find(number(address));
  if (it.end != 0 && number(address) + bytes <= it.end) return "";
  return std::to_string(bytes) + " bytes of device memory that are not all in one allocation";
}

Access::Access() { device_memory_of_process().enter(); }
Access::~Access() { device_memory_of_process().leave(); }

}  // namespace memory
}  // namespace tessera_emulator

using namespace tessera_emulator;

cudaError_t cudaMalloc(void** target, std::size_t bytes) {
  note_slow_call();
  if (device_count() == 0) return report(cudaErrorNoDevice);
  *target = nullptr;
  if (bytes == 0) return cudaSuccess;
  *target = device_memory_of_process().allocate(current_device(), bytes);
  return *target == nullptr ? report(cudaErrorMemoryAllocation) : cudaSuccess;
}

cudaError_t cudaFree(void* address) {
  note_slow_call();
  if (address == nullptr) return cudaSuccess;
  const int device = memory::device_of(address);
  if (device < 0) return report(cudaErrorInvalidValue);
  synchronize_device(device);  // its errors are told by the streams
  return device_memory_of_process().free(number(address)) ? cudaSuccess : report(cudaErrorInvalidValue);
}

/// Keeps nothing: memory goes back to the device when the stream comes to it.
struct CUmemPoolHandle_st {
  int device = 0;
};

namespace {

struct Pools {
  std::mutex mutex;
  std::map<int, std::unique_ptr<CUmemPoolHandle_st>> defaults;
  std::map<std::uintptr_t, CUmemPoolHandle_st*> of_memory;
};
Pools& pools() {
  static Pools* const instance = new Pools;
  return *instance;
}

cudaMemPool_t default_pool(int device) {
  const std::lock_guard lock(pools().mutex);
  auto& pool = pools().defaults[device];
  if (!pool) {
    pool = std::make_unique<CUmemPoolHandle_st>();
    pool->device = device;
  }
  return pool.get();
}

}  // namespace

/// Memory may be used at once, though it is given in the stream's order: the emulator's waits for the stream
/// where only what it gives back is left.
cudaError_t cudaMallocFromPoolAsync(void** target, std::size_t bytes, cudaMemPool_t pool,
                                    cudaStream_t handle) {
  note_slow_call();
  *target = nullptr;
  CUstream_st& stream = resolve(handle);
  if (stream.recording()) return report(cudaErrorStreamCaptureUnsupported);  // would be memory of the graph
  DeviceMemory& memory = device_memory_of_process();
  *target = memory.allocate(pool->device, bytes);
  if (*target == nullptr) {
    stream.synchronize();
    *target = memory.allocate(pool->device, bytes);
  }
  if (*target == nullptr) return report(cudaErrorMemoryAllocation);
  const std::lock_guard lock(pools().mutex);
  pools().of_memory[number(*target)] = pool;
  return cudaSuccess;
}

cudaError_t cudaMallocAsync(void** target, std::size_t bytes, cudaStream_t stream) {
  return cudaMallocFromPoolAsync(target, bytes, default_pool(current_device()), stream);
}

cudaError_t cudaFreeAsync(void* address, cudaStream_t handle) {
  note_slow_call();
  {
    const std::lock_guard lock(pools().mutex);
    if (pools().of_memory.erase(number(address)) == 0) return report(cudaErrorInvalidValue);
  }
  CUstream_st& stream = resolve(handle);
  if (stream.recording()) return report(refuse_if_recorded(stream));
  return report(stream.enqueue("cudaFreeAsync", true, [address](cudaError_t) {
    device_memory_of_process().free(number(address));
    return cudaSuccess;
  }));
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* properties) {
  if (properties->allocType != cudaMemAllocationTypePinned ||
      properties->location.type != cudaMemLocationTypeDevice)
    return report(cudaErrorInvalidValue);
  *pool = new CUmemPoolHandle_st;
  (*pool)->device = properties->location.id;
  return cudaSuccess;
}
cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) {
  delete pool;
  return cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, std::size_t) {
  note_slow_call();
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** target, std::size_t bytes, unsigned) {
  note_slow_call();
  *target = std::aligned_alloc(kPage, round_up(std::max<std::size_t>(bytes, 1), kPage));
  if (*target == nullptr) return report(cudaErrorMemoryAllocation);
  std::lock_guard lock(pinned().mutex);
  pinned().sizes[number(*target)] = bytes;
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void** target, std::size_t bytes) {
  return cudaHostAlloc(target, bytes, cudaHostAllocDefault);
}
cudaError_t cudaFreeHost(void* address) {
  note_slow_call();
  if (address == nullptr) return cudaSuccess;
  for (int device = 0; device < device_count(); ++device) synchronize_device(device);
  {
    std::lock_guard lock(pinned().mutex);
    if (pinned().sizes.erase(number(address)) == 0) return report(cudaErrorInvalidValue);
  }
  std::free(address);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  if (device_count() == 0) return report(cudaErrorNoDevice);
  *total = device_memory();
  *free = *total - std::min(*total, device_memory_of_process().used(current_device()));
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  void* const address = const_cast<void*>(pointer);
  const int device = memory::device_of(pointer);
  if (device >= 0) {
    *attributes = {cudaMemoryTypeDevice, device, address, nullptr};
  } else if (memory::is_pinned(pointer, 1)) {
    *attributes = {cudaMemoryTypeHost, current_device(), address, address};
  } else {
    *attributes = {cudaMemoryTypeUnregistered, -1, nullptr, address};
  }
  return cudaSuccess;
}
