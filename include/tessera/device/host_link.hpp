#pragma once
/// HostLink: copies between host memory and a device, beside what the device computes.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "tessera/device/exec_ctx.hpp"

namespace tessera {

/// A stream each way, so that both directions of the link are busy at once. On the CPU, where a program may
/// use one all the same, both are threads; on meta bytes are counted and nothing moves.
class HostLink {
 public:
  /// `ctx`: whose work is waited for and waits. `pinned`: memory() is such that CUDA copies it without the
  /// host's help; otherwise the host waits for each copy.
  explicit HostLink(const ExecCtx& ctx, bool pinned = true);
  /// Waits for what is under way.
  ~HostLink();
  HostLink(const HostLink&) = delete;
  HostLink& operator=(const HostLink&) = delete;

  /// Zeros in host memory, aligned to 4096 bytes; null on meta. `what` it is for is named when the system has
  /// not got as much: IoError.
  std::shared_ptr<void> memory(std::size_t bytes, const std::string& what) const;
  /// The same, never pinned, for what comes and goes beside work: to give pinned memory back waits for the
  /// device.
  static std::shared_ptr<void> host_memory(std::size_t bytes, const std::string& what);
  /// Copies begin once all is done that ctx.stream was given so far; those to the device also after those to
  /// the host that were asked for before. The event: when it is there. Both ends stay until then.
  Event to_device(void* target, const void* source, std::size_t bytes);
  /// Also after `free`, when nobody reads `target` any more.
  Event to_host(void* target, const void* source, std::size_t bytes, const Event& free = {});
  /// The context of copies to the device: what is launched there follows them.
  const ExecCtx& incoming() const { return incoming_; }
  /// Blocks until all copies are done.
  void synchronize();

  /// Bytes copied so far.
  std::uint64_t bytes_to_device() const { return to_device_; }
  std::uint64_t bytes_to_host() const { return to_host_; }

 private:
  ExecCtx ctx_, incoming_;
  std::shared_ptr<Stream> outgoing_;
  Event left_;  // the last copy to the host
  bool pinned_;
  std::uint64_t to_device_ = 0, to_host_ = 0;
};

}  // namespace tessera
