// Preloaded into a process (LD_PRELOAD): counts what it does to files under a folder, and at the n-th time
// kills it (SIGKILL; of a write the first half is done) or lets that call fail. Set by the environment
// (FAULTS_FOLDER, FAULTS_AT, FAULTS_KIND = kill | kill-parent | ENOSPC | EIO, FAULTS_NO_EXCHANGE, FAULTS_RANK
// = the only RANK that is meant, FAULTS_COUNT = a file for the number at the end, of a process with a RANK
// FAULTS_COUNT.RANK) or by calling faults_arm(). kill-parent is for a rank that its launcher has started.
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>

namespace {

std::atomic<long> count{0};
long at = 0;
int error_wanted = 0;  // 0: kill
bool no_exchange = false, kills_parent = false;
char folder[PATH_MAX] = "";

template <typename Fn>
Fn* real(const char* name) {
  return reinterpret_cast<Fn*>(dlsym(RTLD_NEXT, name));
}

bool is_meant(const char* path) {
  char whole[2 * PATH_MAX];
  if (folder[0] == 0 || path == nullptr) return false;
  if (path[0] != '/') {
    char here[PATH_MAX];
    if (getcwd(here, sizeof here) == nullptr) return false;
    snprintf(whole, sizeof whole, "%s/%s", here, path);
    path = whole;
  }
  return strncmp(path, folder, strlen(folder)) == 0;
}

/// The counts that a lease's holder writes every 20 s: one that fails is made up for by the next, unsaid.
bool is_renewal(const char* path) {
  const char* const name = strstr(path, "/run.lock");
  return name != nullptr && (name[9] == 0 || strstr(name, " (deleted)") != nullptr);
}

bool is_meant(int fd) {
  char link[64], path[PATH_MAX];
  if (folder[0] == 0) return false;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, path, sizeof path - 1);
  if (length <= 0) return false;
  path[length] = 0;
  return is_meant(path) && !(error_wanted != 0 && is_renewal(path));
}

bool is_meant(int dir, const char* path) {
  return path != nullptr && (path[0] == '/' || dir == AT_FDCWD ? is_meant(path) : is_meant(dir));
}

/// True: this call is the one, and is to fail. `removes`: what only tidies up is killed, but never fails.
bool is_due(bool meant, bool removes = false) {
  if (!meant || (removes && error_wanted != 0) || ++count != at) return false;
  if (error_wanted == 0) kill(kills_parent ? getppid() : getpid(), SIGKILL);
  errno = error_wanted;
  return error_wanted != 0;
}

template <typename Write>
ssize_t half_written(int fd, size_t size, Write write) {
  const bool meant = is_meant(fd);
  if (meant && error_wanted == 0 && !kills_parent && count + 1 == at && size > 1) write(size / 2);
  return is_due(meant) ? -1 : write(size);
}

int open_as(const char* name, int dir, const char* path, int flags, mode_t mode) {
  if ((flags & O_CREAT) != 0 && is_due(is_meant(dir, path))) return -1;
  return real<int(int, const char*, int, mode_t)>(name)(dir, path, flags, mode);
}

__attribute__((constructor)) void begin() {
  const char *where = getenv("FAULTS_FOLDER"), *number = getenv("FAULTS_AT"), *kind = getenv("FAULTS_KIND");
  const char *wanted = getenv("FAULTS_RANK"), *rank = getenv("RANK");
  no_exchange = getenv("FAULTS_NO_EXCHANGE") != nullptr;
  if (where == nullptr || (wanted != nullptr && (rank == nullptr || strcmp(rank, wanted) != 0))) return;
  snprintf(folder, sizeof folder, "%s", where);
  at = number == nullptr ? 0 : atol(number);
  kills_parent = kind != nullptr && strcmp(kind, "kill-parent") == 0;
  if (kind != nullptr)
    error_wanted = strcmp(kind, "ENOSPC") == 0 ? ENOSPC : strcmp(kind, "EIO") == 0 ? EIO : 0;
}

__attribute__((destructor)) void end() {
  const char *name = getenv("FAULTS_COUNT"), *rank = getenv("RANK");
  if (name == nullptr || folder[0] == 0) return;
  folder[0] = 0;
  char path[PATH_MAX];
  snprintf(path, sizeof path, rank == nullptr ? "%s" : "%s.%s", name, rank);
  if (FILE* file = fopen(path, "w")) {
    fprintf(file, "%ld\n", count.load());
    fclose(file);
  }
}

}  // namespace

extern "C" {

void faults_arm(const char* where, long number, int error, int without_exchange) {
  count = 0;
  at = number;
  error_wanted = error;
  no_exchange = without_exchange != 0;
  snprintf(folder, sizeof folder, "%s", where);
}

long faults_count() { return count; }

#define TESSERA_OPEN(name)                                                               \
  int name(const char* path, int flags, ...) {                                           \
    va_list list;                                                                        \
    va_start(list, flags);                                                               \
    const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(list, mode_t) : 0; \
    va_end(list);                                                                        \
    return open_as("openat", AT_FDCWD, path, flags, mode);                               \
  }
TESSERA_OPEN(open)
TESSERA_OPEN(open64)
#define TESSERA_OPENAT(name)                                                             \
  int name(int dir, const char* path, int flags, ...) {                                  \
    va_list list;                                                                        \
    va_start(list, flags);                                                               \
    const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(list, mode_t) : 0; \
    va_end(list);                                                                        \
    return open_as("openat", dir, path, flags, mode);                                    \
  }
TESSERA_OPENAT(openat)
TESSERA_OPENAT(openat64)

ssize_t write(int fd, const void* data, size_t size) {
  return half_written(
      fd, size, [&](size_t n) { return real<ssize_t(int, const void*, size_t)>("write")(fd, data, n); });
}
ssize_t pwrite(int fd, const void* data, size_t size, off_t offset) {
  return half_written(fd, size, [&](size_t n) {
    return real<ssize_t(int, const void*, size_t, off_t)>("pwrite")(fd, data, n, offset);
  });
}
ssize_t pwrite64(int fd, const void* data, size_t size, off64_t offset) {
  return pwrite(fd, data, size, offset);
}
int fsync(int fd) { return is_due(is_meant(fd)) ? -1 : real<int(int)>("fsync")(fd); }
int fdatasync(int fd) { return is_due(is_meant(fd)) ? -1 : real<int(int)>("fdatasync")(fd); }
int fallocate(int fd, int mode, off_t offset, off_t length) {
  return is_due(is_meant(fd)) ? -1 : real<int(int, int, off_t, off_t)>("fallocate")(fd, mode, offset, length);
}
int fallocate64(int fd, int mode, off64_t offset, off64_t length) {
  return fallocate(fd, mode, offset, length);
}
int rename(const char* from, const char* to) {
  return is_due(is_meant(to)) ? -1 : real<int(const char*, const char*)>("rename")(from, to);
}
int renameat2(int a, const char* from, int b, const char* to, unsigned flags) {
  if (no_exchange && flags != 0) {
    errno = EINVAL;
    return -1;
  }
  if (is_due(is_meant(b, to))) return -1;
  return real<int(int, const char*, int, const char*, unsigned)>("renameat2")(a, from, b, to, flags);
}
int mkdir(const char* path, mode_t mode) {
  const bool is_new = access(path, F_OK) != 0;  // one that is there is asked for, to see that it is
  return is_due(is_new && is_meant(path)) ? -1 : real<int(const char*, mode_t)>("mkdir")(path, mode);
}
int link(const char* from, const char* to) {
  return is_due(is_meant(to)) ? -1 : real<int(const char*, const char*)>("link")(from, to);
}
int unlink(const char* path) {
  return is_due(is_meant(path), true) ? -1 : real<int(const char*)>("unlink")(path);
}
int unlinkat(int dir, const char* path, int flags) {
  return is_due(is_meant(dir, path), true) ? -1
                                           : real<int(int, const char*, int)>("unlinkat")(dir, path, flags);
}
int rmdir(const char* path) {
  return is_due(is_meant(path), true) ? -1 : real<int(const char*)>("rmdir")(path);
}

}  // extern "C"
