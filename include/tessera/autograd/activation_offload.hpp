#pragma once
/// ActivationOffload: values of forward that wait in host memory for backward.

#include <deque>
#include <memory>
#include <vector>

#include "tessera/device/host_link.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera {

/// Values leave while the device computes the next ones, and come back one ahead of their use, as backward
/// takes them in the opposite order. What is asked for before it has left stays. Serves one stream.
class ActivationOffload : public std::enable_shared_from_this<ActivationOffload> {
 public:
  ActivationOffload(const ExecCtx& ctx, bool pinned);
  /// Waits for what is under way.
  ~ActivationOffload();
  ActivationOffload(const ActivationOffload&) = delete;
  ActivationOffload& operator=(const ActivationOffload&) = delete;

  /// A value that is kept until its last holder is gone; several parts may hold one and restore() it.
  class Kept;
  /// What is kept from here on leaves beside the work of the next part; what was kept before has left.
  void begin_part();
  /// `value`: contiguous; nobody changes it. One that is still leaving is not copied twice.
  std::shared_ptr<Kept> keep(const Tensor& value);
  /// The value on the device, for work of its stream. The one that was kept before it begins to come.
  Tensor restore(const std::shared_ptr<Kept>& kept);

  /// Of host memory, held for values to come as well.
  std::size_t host_bytes() const { return host_bytes_; }
  const HostLink& link() const { return link_; }

 private:
  struct Block {
    std::shared_ptr<void> memory;
    std::size_t bytes = 0;
    Event read = {};  ///< the last copy from it
  };

  Block take(std::size_t bytes);
  void begin(Kept& kept);

  ExecCtx ctx_;
  HostLink link_;
  std::vector<Block> free_;
  std::deque<std::shared_ptr<Kept>> leaving_;  // still on the device
  std::weak_ptr<Kept> last_;
  std::size_t host_bytes_ = 0;
};

}  // namespace tessera
