#include "tessera/autograd/activation_offload.hpp"

#include <algorithm>
#include <utility>

#include "tessera/base/error.hpp"

namespace tessera {
class ActivationOffload::Kept {
 public:
  Kept(ActivationOffload& of, const Tensor& value, Block block)
      : owner_(of.weak_from_this()),
        device_(value),
        shape_(value.shape()),
        dtype_(value.dtype()),
        block_(std::move(block)) {
    left_ = of.link_.to_host(block_.memory.get(), value.raw(), value.nbytes(), block_.read);
  }
  ~Kept() {
    const auto owner = owner_.lock();
    if (!owner) return;                                  // it has waited for all copies
    if (coming_) owner->ctx_.stream->wait(block_.read);  // before its memory is another's
    owner->free_.push_back(std::move(block_));
  }
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;

 private:
  friend class ActivationOffload;
  std::weak_ptr<ActivationOffload> owner_;
  Tensor device_, coming_;
  Shape shape_;
  DType dtype_;
  Block block_;
  Event left_;
  std::weak_ptr<Kept> before_;
};

ActivationOffload::ActivationOffload(const ExecCtx& ctx, bool pinned) : ctx_(ctx), link_(ctx, pinned) {
  ctx_.activations = nullptr;
}

ActivationOffload::~ActivationOffload() {
  try {
    link_.synchronize();
  } catch (const std::exception&) {
    // Whoever waits for what is copied hears of it there.
  }
}

ActivationOffload::Block ActivationOffload::take(std::size_t bytes) {
  const auto found = std::ranges::find_if(free_, [&](const Block& block) { return block.bytes == bytes; });
  if (found != free_.end()) {
    Block block = std::move(*found);
    free_.erase(found);
    return block;
  }
  host_bytes_ += bytes;
  return {.memory = link_.memory(bytes, "offload.activations"), .bytes = bytes};
}

void ActivationOffload::begin_part() {
  for (; !leaving_.empty(); leaving_.pop_front()) {
    ctx_.stream->wait(leaving_.front()->left_);
    leaving_.front()->device_ = {};
  }
}

std::shared_ptr<ActivationOffload::Kept> ActivationOffload::keep(const Tensor& value) {
  TESSERA_CHECK(value.is_contiguous(), "a value of shape ", value.shape(), " that is kept is not contiguous");
  for (const auto& kept : leaving_) {
    if (kept->device_.raw() == value.raw() && kept->shape_ == value.shape()) return kept;
  }
  auto kept = std::make_shared<Kept>(*this, value, take(value.nbytes()));
  kept->before_ = std::exchange(last_, kept);
  leaving_.push_back(kept);
  return kept;
}

void ActivationOffload::begin(Kept& kept) {
  if (kept.device_ || kept.coming_) return;
  kept.coming_ = Tensor::empty(ctx_, kept.shape_, kept.dtype_);
  kept.block_.read = link_.to_device(kept.coming_.raw(), kept.block_.memory.get(), kept.coming_.nbytes());
}

Tensor ActivationOffload::restore(const std::shared_ptr<Kept>& kept) {
  begin(*kept);
  if (const auto before = kept->before_.lock()) begin(*before);
  if (kept->device_) {
    ctx_.stream->wait(kept->left_);  // its memory may soon be another's
    std::erase(leaving_, kept);
    return std::exchange(kept->device_, Tensor());
  }
  ctx_.stream->wait(kept->block_.read);
  return std::exchange(kept->coming_, Tensor());
}

}  // namespace tessera
