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

Tensor append_to_cache(const ExecCtx& ctx, const Tensor& key, const Tensor& value, const CachePlace& place) {
  TESSERA_CHECK(key.rank() == 4 && key.strides() == value.strides() && key.strides()[3] == 1 &&
                    key.shape() == value.shape(),
                "keys and values are laid out alike, [positions, texts, heads, features], not ", key.shape(),
                " and ", value.shape());
  const Tensor &kept = place.key, &pages = place.pages;
  TESSERA_CHECK(kept.rank() == 4 && kept.strides() == place.value.strides() && kept.strides()[3] == 1 &&
                    kept.size(1) == key.size(2) && kept.size(2) == kCachePage &&
                    kept.size(3) == key.size(3) && kept.dtype() == key.dtype(),
                "keys ", key.shape(), " do not go into pages ", kept.shape());
  const bool single = place.first < 0;
  TESSERA_CHECK(pages.rank() == 2 && pages.size(0) == key.size(1) && pages.is_contiguous() &&
                    (single || place.first + key.size(0) <= pages.size(1) * kCachePage),
                "keys ", key.shape(), " from position ", place.first, " on do not go by a table ",
                pages.shape());
  TESSERA_CHECK(!single || (key.size(0) == 1 && place.lengths), "texts that end apart get one position each");
  Tensor begin;
  if (place.window > 0) begin = Tensor::empty(ctx, {key.size(1)}, DType::i32);
  const kernels::AppendToCache params{.positions = key.size(0),
                                      .rows = key.size(1),
                                      .heads = key.size(2),
                                      .head_dim = key.size(3),
                                      .dtype = key.dtype(),
                                      .key = key.raw(),
                                      .value = value.raw(),
                                      .x_position = key.strides()[0],
                                      .x_row = key.strides()[1],
                                      .x_head = key.strides()[2],
                                      .kept_key = kept.raw(),
                                      .kept_value = place.value.raw(),
                                      .kept_page = kept.strides()[0],
                                      .kept_head = kept.strides()[1],
                                      .kept_position = kept.strides()[2],
                                      .pages = pages.data<std::int32_t>(),
                                      .page_entries = pages.size(1),
                                      .first = place.first,
                                      .length = place.lengths ? place.lengths.data<std::int32_t>() : nullptr,
                                      .begin = begin ? begin.data<std::int32_t>() : nullptr,
                                      .window = place.window};
  TESSERA_DISPATCH(ctx, append_to_cache, params);
  return begin;
}

}  // namespace tessera::ops
