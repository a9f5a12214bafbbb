#pragma once
/// A child process that answers framed requests on its standard input and output.

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace tessera {

/// u32 kind, u64 length of the payload, payload; little-endian.
struct Frame {
  std::uint32_t kind = 0;
  std::vector<std::byte> payload;
};

/// Reads a frame through `take`, which fills what it is given or throws; false for a frame longer than 4 GiB.
/// Memory grows with what has come, not with what the frame says of itself.
bool read_frame(const std::function<void(std::span<std::byte>)>& take, Frame& frame);

class WorkerProcess {
 public:
  /// Errors: ConfigError with `remedy` if the program cannot be started.
  WorkerProcess(const std::vector<std::string>& command, double timeout_s, std::string remedy);
  /// Closes its input and ends it if it does not end by itself.
  ~WorkerProcess();
  WorkerProcess(const WorkerProcess&) = delete;
  WorkerProcess& operator=(const WorkerProcess&) = delete;

  /// Errors: IoError with what the process wrote to its standard error, if it ended or does not read in time.
  void send(std::uint32_t kind, std::span<const std::byte> payload);
  /// Errors: as send; also for a frame longer than 4 GiB.
  Frame receive();

 private:
  void transfer(std::byte* data, std::size_t size, bool sending);
  [[noreturn]] void lost(const std::string& what);

  std::string name_;
  std::string remedy_;
  double timeout_s_;
  pid_t pid_ = -1;
  int socket_ = -1;
  int messages_ = -1;  ///< memory file that takes its standard error
};

}  // namespace tessera
