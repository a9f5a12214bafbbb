/// gemm on oneDNN 2.6 or 3.x. fp32 products without a bias go to oneDNN's sgemm, which needs no primitive;
/// all others to a matmul primitive on the operands as they lie in memory (measured: with the scratchpad kept
/// between calls, as fast as packing the weights first, and without a second copy of them).

#include <omp.h>

#include <algorithm>
#include <list>
#include <memory>
#include <mutex>
#include <oneapi/dnnl/dnnl.hpp>
#include <unordered_map>

#include "kernels/api/backends.hpp"
#include "kernels/cpu/gemm_common.hpp"
#include "kernels/cpu/scratch.hpp"
#include "kernels/cpu/vector/isa.hpp"
#include "tessera/base/error.hpp"

namespace tessera::kernels::cpu {
namespace {

using dnnl::memory;

/// Everything a primitive depends on.
struct Key {
  std::int64_t m, n, k, lda, ldb, ldc;
  std::int64_t flags;  // transpositions, dtypes, accumulation, bias
  std::int64_t threads;
  bool operator==(const Key&) const = default;
};

struct KeyHash {
  std::size_t operator()(const Key& key) const {
    std::uint64_t hash = 0;
    for (const std::int64_t word : {key.m, key.n, key.k, key.lda, key.ldb, key.ldc, key.flags, key.threads}) {
      hash = (hash ^ static_cast<std::uint64_t>(word)) * 0x9E3779B97F4A7C15u;
      hash ^= hash >> 29;
    }
    return hash;
  }
};

int gemm_threads(const Launch& launch) {
  return launch.gemm_threads > 0 ? launch.gemm_threads : launch.threads;
}

Key key_of(const Gemm& g, const Launch& launch) {
  const std::int64_t flags = (g.trans_a ? 1 : 0) | (g.trans_b ? 2 : 0) | (g.ab_dtype == DType::bf16 ? 4 : 0) |
                             (g.c_dtype == DType::bf16 ? 8 : 0) | (g.beta != 0.0f ? 16 : 0) |
                             (g.bias != nullptr ? 32 : 0);
  return {g.m, g.n, g.k, g.lda, g.ldb, g.ldc, flags, gemm_threads(launch)};
}

/// oneDNN takes the number of threads, for planning and for running, from the calling thread's OpenMP
/// setting.
class ThreadCount {
 public:
  explicit ThreadCount(int threads) : before_(omp_get_max_threads()), changed_(threads != before_) {
    if (changed_) omp_set_num_threads(threads);
  }
  ~ThreadCount() {
    if (changed_) omp_set_num_threads(before_);
  }
  ThreadCount(const ThreadCount&) = delete;
  ThreadCount& operator=(const ThreadCount&) = delete;

 private:
  int before_;
  bool changed_;
};

/// The CPU as oneDNN sees it: a constant of the process.
const dnnl::engine& cpu_engine() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

memory::data_type type_of(DType dtype) {
  return dtype == DType::bf16 ? memory::data_type::bf16 : memory::data_type::f32;
}

memory::desc matrix(std::int64_t rows, std::int64_t cols, DType dtype, bool transposed, std::int64_t ld) {
  return {{rows, cols}, type_of(dtype), transposed ? memory::dims{1, ld} : memory::dims{ld, 1}};
}

struct Primitive {
  memory::desc a, b, c, bias, scratchpad;
  dnnl::matmul matmul;  ///< empty if oneDNN has none for these dtypes on this machine
};

dnnl::matmul::primitive_desc describe(const Primitive& p, const dnnl::primitive_attr& attributes) {
#if DNNL_VERSION_MAJOR >= 3
  if (p.bias.is_zero()) return {cpu_engine(), p.a, p.b, p.c, attributes};
  return {cpu_engine(), p.a, p.b, p.bias, p.c, attributes};
#else
  if (p.bias.is_zero()) return {dnnl::matmul::desc(p.a, p.b, p.c), attributes, cpu_engine()};
  return {dnnl::matmul::desc(p.a, p.b, p.bias, p.c), attributes, cpu_engine()};
#endif
}

std::shared_ptr<const Primitive> create(const Gemm& g) {
  auto p = std::make_shared<Primitive>();
  p->a = matrix(g.m, g.k, g.ab_dtype, g.trans_a, g.lda);
  p->b = matrix(g.k, g.n, g.ab_dtype, g.trans_b, g.ldb);
  p->c = matrix(g.m, g.n, g.c_dtype, false, g.ldc);
  if (g.bias != nullptr) p->bias = matrix(1, g.n, g.ab_dtype, false, g.n);
  dnnl::primitive_attr attributes;
  // oneDNN's own scratchpad would come fresh from the system at every call: page faults take a fifth of the
  // rate.
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (g.beta != 0.0f) {
    dnnl::post_ops sum;
    sum.append_sum(1.0f);
    attributes.set_post_ops(sum);
  }
  try {
    const auto description = describe(*p, attributes);
    p->scratchpad = description.scratchpad_desc();
    p->matmul = dnnl::matmul(description);
  } catch (const dnnl::error& error) {
    const bool plain = g.ab_dtype == DType::f32 && g.c_dtype == DType::f32;
    if (error.status != dnnl_unimplemented || plain) throw;
  }
  return p;
}

/// Recently used primitives. A memo of `create`, a pure function of the key: whether an entry is found, made
/// or dropped changes how long a call takes and nothing else.
class PrimitiveCache {
 public:
  std::shared_ptr<const Primitive> get(const Gemm& g, const Launch& launch) {
    const Key key = key_of(g, launch);
    {
      const std::lock_guard lock(mutex_);
      const auto found = index_.find(key);
      if (found != index_.end()) {
        entries_.splice(entries_.begin(), entries_, found->second);
        return found->second->second;
      }
    }
    // Made outside the lock: another thread's hit need not wait, and two threads may make the same one.
    auto made = create(g);
    const std::lock_guard lock(mutex_);
    if (index_.contains(key)) return made;
    entries_.emplace_front(key, made);
    index_.emplace(key, entries_.begin());
    if (entries_.size() > kCapacity) {
      index_.erase(entries_.back().first);
      entries_.pop_back();
    }
    return made;
  }

 private:
  static constexpr std::size_t kCapacity = 1024;
  using Entries = std::list<std::pair<Key, std::shared_ptr<const Primitive>>>;

  std::mutex mutex_;
  Entries entries_;  // most recently used first
  std::unordered_map<Key, Entries::iterator, KeyHash> index_;
};

PrimitiveCache& cache() {
  static PrimitiveCache instance;
  return instance;
}

/// One matmul primitive on (a part of) the product. False if oneDNN has none for it.
bool multiply_block(const Gemm& g, const Launch& launch) {
  const auto p = cache().get(g, launch);
  if (!p->matmul) return false;
  const dnnl::engine& engine = cpu_engine();
  const Scratch scratch(p->scratchpad.get_size());
  // oneDNN's memory objects have no const: it only reads the inputs.
  auto wrap = [&](const memory::desc& layout, const void* data) {
    return memory(layout, engine, const_cast<void*>(data));
  };
  std::unordered_map<int, memory> arguments;
  arguments.reserve(5);
  arguments.emplace(DNNL_ARG_SRC, wrap(p->a, g.a));
  arguments.emplace(DNNL_ARG_WEIGHTS, wrap(p->b, g.b));
  arguments.emplace(DNNL_ARG_DST, wrap(p->c, g.c));
  if (g.bias != nullptr) arguments.emplace(DNNL_ARG_BIAS, wrap(p->bias, g.bias));
  if (scratch.data() != nullptr) arguments.emplace(DNNL_ARG_SCRATCHPAD, wrap(p->scratchpad, scratch.data()));
  dnnl::stream stream(engine);
  p->matmul.execute(stream, arguments);
  return true;
}

/// Rows and columns of C that one primitive call should cover: oneDNN 2.6 re-copies operands it has to
/// reorder for every one of its own blocks, and keeps its copies in cache only when these are narrow
/// (measured at GPT-2's shapes).
struct Blocks {
  std::int64_t rows, cols;
};

Blocks blocks_of(const Gemm& g) {
  const bool reordered_a = g.trans_a && g.ab_dtype == DType::bf16;
  const bool long_sums = !g.trans_b && g.k > 4096;
  // For a bf16 result oneDNN accumulates whole rows in fp32 for every thread: four times the result itself.
  constexpr std::int64_t kWidestRow = 8192;
  if (g.c_dtype == DType::bf16 && g.n > kWidestRow && !reordered_a && !long_sums) return {g.m, kWidestRow};
  if (!reordered_a && !long_sums) return {g.m, g.n};
  std::int64_t cols = g.n;
  if (g.n > 512) {
    const std::int64_t count = std::max<std::int64_t>(2, (g.n + 767) / 768);
    cols = ((g.n + count - 1) / count + 63) / 64 * 64;
  }
  return {reordered_a ? 2048 : g.m, cols};
}

bool multiply(const Gemm& g, const Launch& launch) {
  const Blocks blocks = blocks_of(g);
  const auto ab_bytes = static_cast<std::int64_t>(size_of(g.ab_dtype));
  const auto c_bytes = static_cast<std::int64_t>(size_of(g.c_dtype));
  for (std::int64_t n0 = 0; n0 < g.n; n0 += blocks.cols) {
    for (std::int64_t m0 = 0; m0 < g.m; m0 += blocks.rows) {
      Gemm block = g;
      block.m = std::min(blocks.rows, g.m - m0);
      block.n = std::min(blocks.cols, g.n - n0);
      block.a = static_cast<const char*>(g.a) + m0 * (g.trans_a ? 1 : g.lda) * ab_bytes;
      block.b = static_cast<const char*>(g.b) + n0 * (g.trans_b ? g.ldb : 1) * ab_bytes;
      block.c = static_cast<char*>(g.c) + (m0 * g.ldc + n0) * c_bytes;
      if (g.bias != nullptr) block.bias = static_cast<const char*>(g.bias) + n0 * ab_bytes;
      if (!multiply_block(block, launch)) return false;
    }
  }
  return true;
}

/// Whether sgemm is the faster way: always for B as it is; for B transposed only when there are few rows,
/// because its copying of B suffers from cache conflicts when ldb is a large power of two.
bool suits_sgemm(const Gemm& g) {
  if (g.ab_dtype != DType::f32 || g.c_dtype != DType::f32) return false;
  return g.m <= 16 || (!g.trans_b && g.bias == nullptr);
}

void multiply_sgemm(const Gemm& g) {
  float* c = static_cast<float*>(g.c);
  float beta = g.beta;
  if (g.bias != nullptr) {
    const float* bias = static_cast<const float*>(g.bias);
    for (std::int64_t r = 0; r < g.m; ++r) {
      float* row = c + r * g.ldc;
      for (std::int64_t i = 0; i < g.n; ++i) row[i] = beta == 0.0f ? bias[i] : row[i] + bias[i];
    }
    beta = 1.0f;
  }
  const auto status = dnnl_sgemm(g.trans_a ? 'T' : 'N', g.trans_b ? 'T' : 'N', g.m, g.n, g.k, 1.0f,
                                 static_cast<const float*>(g.a), g.lda, static_cast<const float*>(g.b), g.ldb,
                                 beta, c, g.ldc);
  TESSERA_ENSURE(InternalError, status == dnnl_success, "oneDNN sgemm failed with status ",
                 static_cast<int>(status));
}

/// oneDNN 2.6 has no float16 on the CPU and 3.x only where the CPU multiplies it (AVX512-FP16); bfloat16
/// without its instructions is emulated slower than this.
bool through_f32(const Gemm& g) {
  if (g.ab_dtype == DType::f16 || g.c_dtype == DType::f16) return true;
  return g.ab_dtype == DType::bf16 && !has_bf16_instructions();
}

}  // namespace

void gemm(const Gemm& params, const Launch& launch) {
  if (params.m == 0 || params.n == 0) return;
  Gemm g = params;
  g.c = gemm_target(params, launch);
  if (g.k == 0) {
    gemm_without_product(g, launch);
  } else if (has_few_rows(g)) {
    gemm_few_rows(g, gemm_threads(launch));
  } else if (through_f32(g)) {
    gemm_through_f32(g, launch);
  } else {
    const ThreadCount threads(gemm_threads(launch));
    try {
      if (suits_sgemm(g)) {
        multiply_sgemm(g);
      } else if (!multiply(g, launch)) {
        gemm_through_f32(g, launch);
      }
    } catch (const dnnl::error& error) {
      throw InternalError(
          detail::concat("oneDNN failed on a ", g.m, "x", g.n, "x", g.k, " product: ", error.message));
    }
  }
  gemm_apply_epilogue(params, launch);
  if (params.column_sums != nullptr) column_sum(sums_of(params), launch);
}

std::string gemm_library() {
  const dnnl_version_t* version = dnnl_version();
  return detail::concat("oneDNN ", version->major, ".", version->minor, ".", version->patch);
}

}  // namespace tessera::kernels::cpu
