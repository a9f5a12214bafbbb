#include "kernels/cpu/vector/embedding.hpp"

#include "kernels/cpu/vector/philox.hpp"

namespace tessera::kernels::cpu::TESSERA_ISA {

template <typename T, typename Y>
static void forward_rows(const EmbeddingForward& p, std::int64_t begin, std::int64_t end) {
  const T* table = static_cast<const T*>(p.table);
  const T* position_table = static_cast<const T*>(p.position_table);
  for (std::int64_t r = begin; r < end; ++r) {
    const std::int64_t token = p.tokens[r] - p.vocab_begin;
    Y* y = static_cast<Y*>(p.y) + r * p.cols;
    if (token < 0 || token >= p.vocab_size) {
      for_lanes(0, p.cols, [&](std::int64_t i, auto lanes) VEC_LAMBDA { store(y + i, F{}, lanes); });
      continue;
    }
    const T* word = table + token * p.cols;
    const T* position = position_table != nullptr ? position_table + p.positions[r] * p.cols : nullptr;
    auto value = [&](std::int64_t i, auto lanes) VEC_LAMBDA {
      F v = load(word + i, lanes);
      if (position != nullptr) v += load(position + i, lanes);
      return v;
    };
    if (p.dropout.active()) {
      const RowDropout dropout(p.dropout, r, p.cols);
      for_lanes_kept(dropout, p.cols, [&](std::int64_t i, auto lanes, int, I keep) VEC_LAMBDA {
        store(y + i, dropout.apply(value(i, lanes), keep), lanes);
      });
    } else {
      for_lanes(0, p.cols,
                [&](std::int64_t i, auto lanes) VEC_LAMBDA { store(y + i, value(i, lanes), lanes); });
    }
  }
}

template <typename T>
static void backward_columns(const EmbeddingBackward& p, std::int64_t begin, std::int64_t end) {
  for (std::int64_t r = 0; r < p.rows; ++r) {
    const std::int64_t index = p.index[r] - p.begin;
    if (index < 0 || index >= p.count || p.index[r] == p.skip) continue;
    const T* dy = static_cast<const T*>(p.dy) + r * p.cols;
    float* out = p.dtable + index * p.cols;
    if (!p.dropout.active()) {
      for_lanes(begin, end, [&](std::int64_t i, auto lanes) VEC_LAMBDA {
        store(out + i, load(out + i, lanes) + load(dy + i, lanes), lanes);
      });
      continue;
    }
    const RowDropout dropout(p.dropout, r, p.cols);
    for (std::int64_t f = begin; f < end; f += 4 * kLanes) {
      I keep[4];
      dropout.kept(f, keep);
      int j = 0;
      for_lanes(f, f + 4 * kLanes < end ? f + 4 * kLanes : end, [&](std::int64_t i, auto lanes) VEC_LAMBDA {
        store(out + i, load(out + i, lanes) + dropout.apply(load(dy + i, lanes), keep[j++]), lanes);
      });
    }
  }
}

void embedding_forward_rows(const EmbeddingForward& params, std::int64_t begin, std::int64_t end) {
  visit_dtypes(params.table_dtype, params.y_dtype, [&](auto t, auto y) VEC_LAMBDA {
    forward_rows<decltype(t), decltype(y)>(params, begin, end);
  });
}

void embedding_backward_columns(const EmbeddingBackward& params, std::int64_t begin, std::int64_t end) {
  visit_dtype(params.dy_dtype, [&](auto t) VEC_LAMBDA { backward_columns<decltype(t)>(params, begin, end); });
}

}  // namespace tessera::kernels::cpu::TESSERA_ISA
