#include "tessera/ops/embedding.hpp"

#include "kernels/api/embedding.hpp"
#include "ops/dispatch.hpp"
#include "ops/matrix.hpp"

namespace tessera::ops {

Tensor embedding(const ExecCtx& ctx, const Tensor& tokens, const Tensor& table, const Tensor& positions,
                 const Tensor& position_table, const EmbeddingOptions& options) {
  detail::check_contiguous(tokens, "tokens");
  TESSERA_CHECK(table.rank() == 2 && table.is_contiguous(), "an embedding table is [rows, features], not ",
                table.shape());
  detail::check_one_short(table.dtype(), options.out, "an embedding");
  TESSERA_CHECK(static_cast<bool>(positions) == static_cast<bool>(position_table),
                "positions come with a position table");
  if (position_table) {
    TESSERA_CHECK(positions.numel() == tokens.numel() && position_table.size(-1) == table.size(-1) &&
                      position_table.dtype() == table.dtype(),
                  "position table ", position_table.shape(), " does not go with token table ", table.shape());
  }
  const std::int64_t rows = tokens.numel(), cols = table.size(1);
  TESSERA_CHECK(tokens.rank() < Shape::kMaxRank, "tokens have too many dimensions");
  std::vector<std::int64_t> dims(tokens.shape().dims().begin(), tokens.shape().dims().end());
  dims.push_back(cols);
  Tensor y = Tensor::empty(ctx, Shape(std::span<const std::int64_t>(dims)), options.out);
  const kernels::EmbeddingForward params{.rows = rows,
                                         .cols = cols,
                                         .table_dtype = table.dtype(),
                                         .y_dtype = options.out,
                                         .tokens = tokens.data<std::int32_t>(),
                                         .table = table.raw(),
                                         .vocab_begin = options.first_token,
                                         .vocab_size = table.size(0),
                                         .positions = positions ? positions.data<std::int32_t>() : nullptr,
                                         .position_table = position_table.raw(),
                                         .y = y.raw(),
                                         .dropout = options.dropout};
  TESSERA_DISPATCH(ctx, embedding_forward, params);
  return y;
}

void embedding_backward(const ExecCtx& ctx, const Tensor& index, const Tensor& dy, const Tensor& dtable,
                        float beta, const DropoutSpec& dropout, std::int64_t first, std::int64_t skip) {
  detail::check_contiguous_floats(dy, "dy");
  TESSERA_CHECK(
      dtable.rank() == 2 && dtable.size(1) == dy.size(-1) && dy.numel() == index.numel() * dy.size(-1),
      "gradient ", dy.shape(), " of ", index.numel(), " rows into a table ", dtable.shape());
  const kernels::EmbeddingBackward params{.rows = index.numel(),
                                          .cols = dy.size(-1),
                                          .dy_dtype = dy.dtype(),
                                          .dy = dy.raw(),
                                          .index = index.data<std::int32_t>(),
                                          .begin = first,
                                          .count = dtable.size(0),
                                          .dtable = dtable.data<float>(),
                                          .skip = skip,
                                          .beta = beta,
                                          .dropout = dropout};
  TESSERA_DISPATCH(ctx, embedding_backward, params);
}

}  // namespace tessera::ops
