#include "tessera/optim/gradient_memory.hpp"

#include <algorithm>

#include "tessera/ops/elementwise.hpp"

namespace tessera {

GradientMemory::GradientMemory(const ExecCtx& ctx, const std::shared_ptr<OffloadPlace>& place,
                               std::int64_t numel)
    : ctx_(ctx) {
  if (place && place->config.gradients != OffloadTo::none) {
    away_ = std::make_shared<OffloadedBuffer>(place, place->config.gradients, "gradients", DType::f32, numel);
    tile_ = place->config.tile;
  } else {
    on_device_ = Tensor::empty(ctx, {numel}, DType::f32);
  }
}

StateValues GradientMemory::values(const Range& run) const {
  if (away_) return away_->values(away_, run);
  return {on_device_.narrow(0, run.begin, run.count)};
}

Tensor GradientMemory::read(const Range& run) const {
  return away_ ? away_->load(run) : on_device_.narrow(0, run.begin, run.count);
}

void GradientMemory::change(const Range& run, bool reads, const Part& part) const {
  if (!away_) return part(on_device_.narrow(0, run.begin, run.count), run);
  for (std::int64_t done = 0; done < run.count; done += tile_) {
    const Range where{run.begin + done, std::min(tile_, run.count - done)};
    Tensor values = reads ? away_->load(where) : Tensor::empty(ctx_, {where.count}, DType::f32);
    part(values, where);
    away_->give(where, std::move(values));
  }
}

void GradientMemory::zero() const {
  change({0, numel()}, false, [this](const Tensor& values, const Range&) { ops::fill_zero(ctx_, values); });
}

std::size_t GradientMemory::resident_bytes() const {
  return away_ ? away_->resident_bytes() : on_device_ ? on_device_.nbytes() : 0;
}

}  // namespace tessera
