#pragma once
/// What each kernel does at least: which part of a step it belongs to, its operations, the bytes it reads and
/// writes. A kernel without an entry does not compile where it is dispatched. Vectors beside matrices
/// (biases, norm weights, statistics of rows) are counted where they are not negligible.

#include <algorithm>

#include "kernels/api/activation.hpp"
#include "kernels/api/attention.hpp"
#include "kernels/api/cross_entropy.hpp"
#include "kernels/api/elementwise.hpp"
#include "kernels/api/embedding.hpp"
#include "kernels/api/gemm.hpp"
#include "kernels/api/moe.hpp"
#include "kernels/api/norm.hpp"
#include "kernels/api/optimizer.hpp"
#include "kernels/api/reduce.hpp"
#include "kernels/api/rope.hpp"
#include "kernels/api/sampling.hpp"
#include "kernels/api/split_norm.hpp"
#include "tessera/base/error.hpp"
#include "tessera/device/trace.hpp"

namespace tessera::ops::detail {

inline double product(std::int64_t a, std::int64_t b) {
  return static_cast<double>(a) * static_cast<double>(b);
}
inline double bytes_of(DType dtype) { return static_cast<double>(size_of(dtype)); }
inline Work moves(double bytes) { return {.kind = WorkKind::elementwise, .bytes = bytes}; }
inline Work updates(double bytes) { return {.kind = WorkKind::optimizer, .bytes = bytes}; }

inline Work work_of(const kernels::Gemm& g) {
  const int results = 1 + (g.beta != 0.0f ? 1 : 0) + (g.pre != nullptr ? 1 : 0);
  const double c = product(g.m, g.n) * bytes_of(g.c_dtype) * results;
  return {.kind = WorkKind::gemm,
          .name = tessera::detail::concat("gemm ", g.m, "x", g.n, "x", g.k),
          .flops = 2.0 * product(g.m, g.n) * static_cast<double>(g.k),
          .bytes = (product(g.m, g.k) + product(g.k, g.n)) * bytes_of(g.ab_dtype) + c,
          .product = std::make_shared<const kernels::Gemm>(g)};
}

/// `products`: of the size of the scores. Only what causality leaves is counted; documents and key ranges are
/// known on the device alone.
inline Work attention_work(const kernels::AttentionShape& s, int products, int queries, int keys) {
  double seen = 0;  // pairs of query and key
  for (std::int64_t i = 0; i < s.seq_q; ++i) {
    const std::int64_t most = s.causal ? std::min(s.seq_k, i + s.query_offset + 1) : s.seq_k;
    seen += static_cast<double>(std::max<std::int64_t>(0, most));
  }
  const double q = product(s.batch, s.seq_q) * product(s.heads, s.head_dim);
  const double k = product(s.batch, s.seq_k) * product(s.kv_heads, s.head_dim);
  return {.kind = WorkKind::attention,
          .flops = 2.0 * products * seen * product(s.batch, s.heads) * static_cast<double>(s.head_dim),
          .bytes = (queries * q + keys * k) * bytes_of(s.dtype)};
}
/// Scores and their product with v; reads q, k, v, writes o.
inline Work work_of(const kernels::AttentionForward& a) { return attention_work(a.shape, 2, 2, 2); }
/// Scores again, since none are kept, and four gradients; reads q, k, v, o, do, writes dq, dk, dv.
inline Work work_of(const kernels::AttentionBackward& a) { return attention_work(a.shape, 5, 4, 4); }

inline Work work_of(const kernels::AddNormForward& n) {
  const double residual =
      n.branch != nullptr ? 2 * bytes_of(n.residual_dtype) + bytes_of(n.dtype) : bytes_of(n.residual_dtype);
  return moves(product(n.rows, n.cols) * (residual + bytes_of(n.dtype)));
}
inline Work work_of(const kernels::AddNormBackward& n) {
  const int residuals = 2 + (n.dresidual != nullptr ? 1 : 0), others = 1 + (n.dbranch != nullptr ? 1 : 0);
  return moves(product(n.rows, n.cols) *
               (residuals * bytes_of(n.residual_dtype) + others * bytes_of(n.dtype)));
}
inline Work work_of(const kernels::NormWeightGrad& n) {
  return moves(product(n.rows, n.cols) * (bytes_of(n.residual_dtype) + bytes_of(n.dtype)));
}
inline Work work_of(const kernels::AddNormGradients& n) { return work_of(n.input); }
inline Work work_of(const kernels::RowProducts& p) {
  return moves(product(p.rows, p.cols) * (p.a == p.b ? 1 : 2) * bytes_of(p.dtype));
}
inline Work work_of(const kernels::InverseRoots& p) { return moves(static_cast<double>(p.n) * 8); }
inline Work work_of(const kernels::NormProjection& p) {
  return moves(product(p.rows, p.cols) * 3 * bytes_of(p.dtype));
}

inline Work work_of(const kernels::Axpby& a) {
  return moves(static_cast<double>(a.n) *
               (bytes_of(a.x_dtype) + bytes_of(a.y_dtype) * (a.beta != 0.0f ? 2 : 1)));
}
inline Work work_of(const kernels::Add& a) {
  return moves(static_cast<double>(a.n) *
               (bytes_of(a.a_dtype) + bytes_of(a.b_dtype) + bytes_of(a.out_dtype)));
}
inline Work work_of(const kernels::Dropout& d) {
  return moves(2 * product(d.rows, d.cols) * bytes_of(d.dtype));
}
inline Work work_of(const kernels::ScaleBy& s) { return moves(8.0 * static_cast<double>(s.n)); }
inline Work work_of(const kernels::CopyStrided& c) {
  return moves(2 * product(c.size[0], c.size[1]) * product(c.size[2], c.size[3]) * bytes_of(c.dtype));
}
inline Work work_of(const kernels::FillZero& f) { return moves(static_cast<double>(f.bytes)); }
inline Work work_of(const kernels::FillConstant& f) { return moves(4.0 * static_cast<double>(f.n)); }
inline Work work_of(const kernels::FillNormal& f) { return moves(4.0 * product(f.rows, f.cols)); }

inline Work work_of(const kernels::ActivationForward& a) {
  return moves(2.0 * static_cast<double>(a.n) * bytes_of(a.dtype));
}
inline Work work_of(const kernels::ActivationBackward& a) {
  return moves(3.0 * static_cast<double>(a.n) * bytes_of(a.dtype));
}
inline Work work_of(const kernels::SwigluForward& s) {
  return moves(3 * product(s.rows, s.width) * bytes_of(s.dtype));
}
inline Work work_of(const kernels::SwigluBackward& s) {
  return moves(5 * product(s.rows, s.width) * bytes_of(s.dtype));
}
inline Work work_of(const kernels::Rope& r) {
  return moves(2 * product(r.rows, r.heads) * static_cast<double>(r.rotary_dim) * bytes_of(r.dtype));
}

inline Work work_of(const kernels::EmbeddingForward& e) {
  const int tables = e.position_table != nullptr ? 2 : 1;
  return moves(product(e.rows, e.cols) * (tables * bytes_of(e.table_dtype) + bytes_of(e.y_dtype)));
}
/// Rows of the table that are named are read and written; with beta 0 the whole table is.
inline Work work_of(const kernels::EmbeddingBackward& e) {
  const double table = e.beta == 0.0f ? 4.0 * product(e.count, e.cols) : 0.0;
  return moves(product(e.rows, e.cols) * (bytes_of(e.dy_dtype) + 8.0) + table);
}

inline Work work_of(const kernels::SampleTokens& s) {
  return moves(product(s.rows, s.cols) * bytes_of(s.dtype));
}
/// Keys and values are read and written.
inline Work work_of(const kernels::AppendToCache& a) {
  return moves(4.0 * product(a.positions, a.rows) * product(a.heads, a.head_dim) * bytes_of(a.dtype));
}

inline Work work_of(const kernels::CrossEntropyForward& c) {
  return moves(product(c.rows, c.cols) * bytes_of(c.dtype));
}
inline Work work_of(const kernels::CrossEntropyCombine& c) { return moves(8.0 * product(c.rows, c.parts)); }
inline Work work_of(const kernels::CrossEntropyBackward& c) {
  return moves(2 * product(c.rows, c.cols) * bytes_of(c.dtype));
}

/// Logits are read for their greatest and for their sum, the second time out of a cache.
inline Work work_of(const kernels::RouteForward& r) {
  return moves(product(r.tokens, r.experts) * bytes_of(r.dtype) + 8 * product(r.tokens, r.topk));
}
inline Work work_of(const kernels::RouteBackward& r) {
  return moves(2 * product(r.tokens, r.experts) * bytes_of(r.dtype) + 12 * product(r.tokens, r.topk));
}
inline Work work_of(const kernels::RouteSums& r) {
  return moves(product(r.tokens, r.experts) * bytes_of(r.dtype) + 4 * product(r.tokens, r.topk));
}
inline Work work_of(const kernels::BalanceForward& b) { return moves(12 * product(b.batch, b.experts)); }
inline Work work_of(const kernels::SortSlots& s) { return moves(16 * static_cast<double>(s.slots)); }
/// Rows of every slot are read, those of tokens written.
inline Work work_of(const kernels::CombineSlots& c) {
  return moves(product(c.tokens, c.topk + 1) * static_cast<double>(c.cols) * bytes_of(c.dtype));
}
/// Both are read and written.
inline Work work_of(const kernels::WeighRows& w) {
  return moves(4 * product(w.rows, w.cols) * bytes_of(w.dtype));
}

inline Work work_of(const kernels::ColumnSum& c) {
  return moves(product(c.rows, c.cols) * bytes_of(c.dtype));
}
inline Work work_of(const kernels::Sum& s) { return moves(4.0 * static_cast<double>(s.n)); }

/// The gradient's norm is the optimizer's. Runs are as long as they may be, but for each parameter's last.
inline Work work_of(const kernels::SumSquares& s) {
  return updates(4.0 * product(s.num_runs, kernels::SumRun::kMost));
}
inline Work work_of(const kernels::BeginUpdate&) { return updates(0); }
inline Work work_of(const kernels::UpdateGroups&) { return updates(0); }
inline Work work_of(const kernels::SplitMain& s) { return updates(static_cast<double>(s.n) * 8); }
inline Work work_of(const kernels::JoinMain& j) { return updates(static_cast<double>(j.n) * 8); }
/// Of a compute copy; a split main weight is as long as one in fp32, with its copy inside.
inline double copy_bytes(const void* model, const void* low, DType dtype) {
  return model != nullptr && low == nullptr ? bytes_of(dtype) : 0.0;
}
inline Work work_of(const kernels::Adam& a) {
  const double model = copy_bytes(a.model, a.low, a.model_dtype);
  return updates(static_cast<double>(a.n) * (4.0 * 7 + model));  // reads g, w, m, v; writes w, m, v
}
inline Work work_of(const kernels::Sgd& s) {
  const double model = copy_bytes(s.model, s.low, s.model_dtype);
  return updates(static_cast<double>(s.n) * (4.0 * (s.buffer != nullptr ? 5 : 3) + model));
}

}  // namespace tessera::ops::detail
