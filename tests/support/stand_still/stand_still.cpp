/// Preloaded into a process, makes it hang as hardware does, once a file is there:
/// DEAD_DISK=SUFFIX:FILE  reading mapped files whose names end in SUFFIX never comes back, once FILE exists;
/// DEAD_KERNEL=FILE       the next parallel region of a kernel never comes back.
/// A page that a dead disk does not deliver is one that nobody puts behind a userfaultfd.

#include <dlfcn.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

namespace {

void give_up(const char* what) {
  std::perror(what);
  _exit(99);
}

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

bool there(const std::string& file) { return access(file.c_str(), F_OK) == 0; }

std::string path_of(int fd) {
  char path[4096];
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  const ssize_t length = readlink(link.c_str(), path, sizeof path);
  return length > 0 ? std::string(path, static_cast<std::size_t>(length)) : "";
}

/// From now on no page of the memory is there, and none will come.
void take_away(void* memory, std::size_t bytes) {
  const auto fd = static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY));
  if (fd < 0) give_up("userfaultfd");
  uffdio_api api{};
  api.api = UFFD_API;
  if (ioctl(fd, UFFDIO_API, &api) != 0) give_up("UFFDIO_API");
  uffdio_register range{};
  range.range.start = reinterpret_cast<std::uintptr_t>(memory);
  range.range.len = bytes;
  range.mode = UFFDIO_REGISTER_MODE_MISSING;
  if (ioctl(fd, UFFDIO_REGISTER, &range) != 0) give_up("UFFDIO_REGISTER");
  if (madvise(memory, bytes, MADV_DONTNEED) != 0) give_up("madvise");
}

struct Mapping {
  void* memory = nullptr;
  std::size_t bytes = 0;
};
std::mutex mutex;  // guards the two below
std::array<Mapping, 64> mappings;
bool watching = false;

void wait_for(const std::string& trigger) {
  while (!there(trigger)) usleep(2000);
  const std::lock_guard lock(mutex);
  for (const Mapping& mapping : mappings) {
    if (mapping.memory != nullptr) take_away(mapping.memory, mapping.bytes);
  }
}

/// A copy of the file in memory, until the disk dies.
void* map_mortal(void* address, std::size_t length, int fd, off_t offset, const std::string& trigger) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t bytes = (length + page - 1) / page * page;
  void* const memory = reinterpret_cast<void*>(
      syscall(SYS_mmap, address, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (memory == MAP_FAILED) return memory;
  for (std::size_t done = 0; done < length;) {
    const ssize_t got =
        pread(fd, static_cast<char*>(memory) + done, length - done, offset + static_cast<off_t>(done));
    if (got <= 0) give_up("pread");
    done += static_cast<std::size_t>(got);
  }
  const std::lock_guard lock(mutex);
  for (Mapping& mapping : mappings) {
    if (mapping.memory != nullptr) continue;
    mapping = {memory, bytes};
    if (!std::exchange(watching, true)) std::thread([trigger] { wait_for(trigger); }).detach();
    return memory;
  }
  give_up("too many mappings");
  return memory;
}

}  // namespace

extern "C" {

void* mmap(void* address, std::size_t length, int protection, int flags, int fd, off_t offset) noexcept {
  const std::string disk = fd < 0 ? "" : variable("DEAD_DISK");
  const std::size_t colon = disk.find(':');
  if (colon != std::string::npos && path_of(fd).ends_with(disk.substr(0, colon)))
    return map_mortal(address, length, fd, offset, disk.substr(colon + 1));
  return reinterpret_cast<void*>(syscall(SYS_mmap, address, length, protection, flags, fd, offset));
}

int munmap(void* memory, std::size_t length) noexcept {
  {
    const std::lock_guard lock(mutex);
    for (Mapping& mapping : mappings) {
      if (mapping.memory == memory) mapping = {};
    }
  }
  return static_cast<int>(syscall(SYS_munmap, memory, length));
}

void* mmap64(void* address, std::size_t length, int protection, int flags, int fd, off_t offset) noexcept {
  return mmap(address, length, protection, flags, fd, offset);
}

void GOMP_parallel(void (*function)(void*), void* data, unsigned threads, unsigned flags) {
  using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
  // Not RTLD_NEXT: below a Python module the library is in no global scope.
  static const auto real =
      reinterpret_cast<Parallel>(dlsym(dlopen("libgomp.so.1", RTLD_LAZY | RTLD_NOLOAD), "GOMP_parallel"));
  static const std::string trigger = variable("DEAD_KERNEL");
  if (!trigger.empty() && there(trigger)) {
    for (;;) pause();
  }
  real(function, data, threads, flags);
}

}  // extern "C"
