/// Preloaded into a process, makes it hang as hardware does, once a file is there:
/// DEAD_DISK=SUFFIX:FILE  reading files whose names end in SUFFIX never comes back, once FILE exists;
/// SLOW_DISK=SUFFIX:SECONDS  each such read takes so long;
/// DEAD_KERNEL=FILE       the next parallel region of a kernel never comes back.

#include <dlfcn.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

namespace {

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

[[noreturn]] void hang() {
  for (;;) pause();
}

/// What stands behind the colon in variable `name`, if the file's name ends in what stands before it.
std::string meant(const char* name, int fd) {
  const std::string disk = variable(name);
  const std::size_t colon = disk.find(':');
  const bool hit = colon != std::string::npos && path_of(fd).ends_with(disk.substr(0, colon));
  return hit ? disk.substr(colon + 1) : "";
}

bool is_dead(int fd) {
  const std::string trigger = meant("DEAD_DISK", fd);
  return !trigger.empty() && there(trigger);
}

}  // namespace

extern "C" {

ssize_t pread(int fd, void* out, std::size_t bytes, off_t offset) {
  if (is_dead(fd)) hang();
  if (const std::string pause_s = meant("SLOW_DISK", fd); !pause_s.empty())
    usleep(static_cast<useconds_t>(1e6 * std::atof(pause_s.c_str())));
  return syscall(SYS_pread64, fd, out, bytes, offset);
}

ssize_t pread64(int fd, void* out, std::size_t bytes, off_t offset) { return pread(fd, out, bytes, offset); }

void GOMP_parallel(void (*function)(void*), void* data, unsigned threads, unsigned flags) {
  using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
  // Not RTLD_NEXT: below a Python module the library is in no global scope.
  static const auto real =
      reinterpret_cast<Parallel>(dlsym(dlopen("libgomp.so.1", RTLD_LAZY | RTLD_NOLOAD), "GOMP_parallel"));
  static const std::string trigger = variable("DEAD_KERNEL");
  if (!trigger.empty() && there(trigger)) hang();
  real(function, data, threads, flags);
}

}  // extern "C"
