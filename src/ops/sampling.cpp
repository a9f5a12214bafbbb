#include "tessera/ops/sampling.hpp"

#include "kernels/api/sampling.hpp"
#include "ops/dispatch.hpp"
#include "ops/matrix.hpp"

namespace tessera::ops {

void sample_tokens(const ExecCtx& ctx, const Tensor& logits, const SamplingState& state) {
  TESSERA_CHECK(ctx.device().is_cuda(), "tokens are drawn by a kernel on CUDA alone");
  TESSERA_CHECK(logits.rank() == 2 && logits.strides()[1] == 1, "logits are [rows, vocabulary], not ",
                logits.shape());
  const std::int64_t rows = logits.size(0), cols = logits.size(1);
  constexpr auto kRow = static_cast<std::int64_t>(sizeof(SamplingRow)),
                 kDrawn = static_cast<std::int64_t>(sizeof(DrawnToken));
  TESSERA_CHECK(state.rows.numel() * 4 == rows * kRow && state.drawn.numel() * 4 == rows * kDrawn,
                "a sampling state of ", state.rows.shape(), " does not go with logits ", logits.shape());
  const auto bits = [](const Tensor& tensor) { return reinterpret_cast<std::uint32_t*>(tensor.raw()); };
  Tensor weights;
  if (!state.greedy) weights = Tensor::empty(ctx, {rows, 2 * cols}, DType::i32);
  const kernels::SampleTokens params{.rows = rows,
                                     .cols = cols,
                                     .ld = logits.strides()[0],
                                     .dtype = logits.dtype(),
                                     .logits = logits.raw(),
                                     .row = static_cast<SamplingRow*>(state.rows.raw()),
                                     .seen = bits(state.seen),
                                     .stops = bits(state.stops),
                                     .weights = static_cast<std::uint64_t*>(weights.raw()),
                                     .token = state.tokens.data<std::int32_t>(),
                                     .position = state.positions.data<std::int32_t>(),
                                     .length = state.lengths.data<std::int32_t>(),
                                     .drawn = static_cast<DrawnToken*>(state.drawn.raw())};
  detail::dispatch<kernels::SampleTokens>(ctx, nullptr, &kernels::cuda::sample_tokens, "sample_tokens",
                                          params);
}

Tensor append_to_cache(const ExecCtx& ctx, const Tensor& key, const Tensor& value, const Tensor& kept_key,
                       const Tensor& kept_value, const Tensor& lengths, std::int64_t window) {
  TESSERA_CHECK(key.rank() == 3 && key.strides() == value.strides() && key.strides()[2] == 1 &&
                    key.shape() == value.shape(),
                "keys and values are laid out alike, [texts, heads, features], not ", key.shape(), " and ",
                value.shape());
  TESSERA_CHECK(kept_key.rank() == 4 && kept_key.strides() == kept_value.strides() &&
                    kept_key.strides()[3] == 1 && kept_key.size(0) == key.size(0) &&
                    kept_key.size(1) == key.size(1) && kept_key.size(3) == key.size(2) &&
                    kept_key.dtype() == key.dtype(),
                "keys ", key.shape(), " do not go into a cache ", kept_key.shape());
  Tensor begin;
  if (window > 0) begin = Tensor::empty(ctx, {key.size(0)}, DType::i32);
  const kernels::AppendToCache params{.rows = key.size(0),
                                      .heads = key.size(1),
                                      .head_dim = key.size(2),
                                      .dtype = key.dtype(),
                                      .key = key.raw(),
                                      .value = value.raw(),
                                      .x_row = key.strides()[0],
                                      .x_head = key.strides()[1],
                                      .kept_key = kept_key.raw(),
                                      .kept_value = kept_value.raw(),
                                      .kept_row = kept_key.strides()[0],
                                      .kept_head = kept_key.strides()[1],
                                      .kept_position = kept_key.strides()[2],
                                      .length = lengths.data<std::int32_t>(),
                                      .begin = begin ? begin.data<std::int32_t>() : nullptr,
                                      .window = window};
  TESSERA_DISPATCH(ctx, append_to_cache, params);
  return begin;
}

}  // namespace tessera::ops
