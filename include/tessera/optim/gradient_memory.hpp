#pragma once
/// GradientMemory: a flat fp32 gradient on the device, or in host memory.

#include <functional>
#include <memory>

#include "tessera/optim/offloaded_buffer.hpp"

namespace tessera {

class GradientMemory {
 public:
  GradientMemory() = default;
  /// Uninitialised on the device; in host memory, where `place` offloads gradients, zeros.
  GradientMemory(const ExecCtx& ctx, const std::shared_ptr<OffloadPlace>& place, std::int64_t numel);

  explicit operator bool() const { return on_device_ || away_; }
  std::int64_t numel() const { return away_ ? away_->numel() : on_device_.numel(); }
  /// Undefined where it is elsewhere.
  const Tensor& on_device() const { return on_device_; }
  /// Null where it is on the device.
  const std::shared_ptr<OffloadedBuffer>& away() const { return away_; }
  /// Where elements `run` are, for checkpoints.
  StateValues values(const Range& run) const;
  /// Elements `run` on the device: a view, or a copy.
  Tensor read(const Range& run) const;
  /// Hands out elements `run` on the device to be changed, at once or, from elsewhere, in tiles; `part` is
  /// told where they lie. Not `reads`: what they are before does not matter.
  using Part = std::function<void(const Tensor& values, const Range& where)>;
  void change(const Range& run, bool reads, const Part& part) const;
  void zero() const;
  std::size_t resident_bytes() const;

 private:
  ExecCtx ctx_;
  Tensor on_device_;
  std::shared_ptr<OffloadedBuffer> away_;
  std::int64_t tile_ = 0;
};

}  // namespace tessera
