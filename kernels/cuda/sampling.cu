/// Drawing tokens where the logits are, and what a decoding pass adds to the cache.
///
/// A block draws for a row. Weights exp((x - largest) / temperature) are whole numbers of 2^-s, so that sums
/// do not depend on their order: s leaves room for a sum over the row, 46 bits for 50,000 tokens. Which of
/// them stay (top_k, top_p) is found from the highest byte of the ordered score down, by sums over 256
/// classes each; of equal scores the lower tokens stay. A greedy row is read once, twice with its
/// log-probability; another one 3 to 12 times, out of the L2 cache.

#include "kernels/api/sampling.hpp"

#include <algorithm>

#include "kernels/cuda/common.cuh"

namespace tessera::kernels::cuda {
namespace {

using Weight = unsigned long long;  // atomics know no std::uint64_t

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;
constexpr int kClasses = 256;
constexpr unsigned kAll = 0xffffffffu;

/// Rises with the score; that of -inf is kNoKey.
__device__ __forceinline__ std::uint32_t key_of(float score) {
  const std::uint32_t bits = __float_as_uint(score);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float score_of(std::uint32_t key) {
  return __uint_as_float((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key);
}
constexpr std::uint32_t kNoKey = 0x007fffffu;

/// A row's scores: its logits with penalties, without what may not be drawn.
template <typename T>
struct Scores {
  const T* logits;
  const std::uint32_t *seen, *stops;  // null: nobody asks
  float penalty;

  static __device__ __forceinline__ bool has(const std::uint32_t* bits, std::int64_t token) {
    return bits != nullptr && (bits[token / 32] >> (token % 32) & 1u) != 0;
  }
  __device__ __forceinline__ float raw(std::int64_t token) const { return to_float(logits[token]); }
  __device__ __forceinline__ float operator()(std::int64_t token) const {
    float score = raw(token) + 0.0f;  // of two zeros there is one
    if (has(seen, token)) score = score < 0.0f ? score * penalty : score / penalty;
    return has(stops, token) ? -INFINITY : score;
  }
};

struct Shared {
  union {  // for one reduction at a time
    float floats[kWarp];
    double doubles[kWarp];
    Weight weights[kWarp];
  };
  Weight classes[kClasses];
  Weight found, left;  // what thread 0 tells the others
};

__device__ Weight sum_of_block(Weight x, Shared& shared) {
  return detail::block_reduce(x, Weight{0}, shared.weights, detail::Plus{});
}
struct Higher {
  __device__ __forceinline__ Weight operator()(Weight a, Weight b) const { return a > b ? a : b; }
};

/// Sum over the lanes before this one, and this one.
__device__ __forceinline__ Weight sum_up_to(Weight x) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const Weight before = __shfl_up_sync(kAll, x, step);
    if (lane >= step) x += before;
  }
  return x;
}

/// Tokens that stay: those of keys above `key`, and of that key the first `ties`.
struct Cut {
  std::uint32_t key = kNoKey;
  Weight ties = 0;
};

/// In the first warp: the highest class at which the sum from the highest one on reaches `wanted`, and what
/// is wanted of it. No class if all of them are less.
__device__ void find_class(Weight wanted, Shared& shared) {
  const int lane = static_cast<int>(threadIdx.x);
  constexpr int kEach = kClasses / kWarp;
  Weight own = 0;
  for (int i = 0; i < kEach; ++i) own += shared.classes[kClasses - 1 - (lane * kEach + i)];
  const Weight with = sum_up_to(own);
  if (lane == kWarp - 1 && with < wanted) shared.found = kClasses;
  if (with < wanted || with - own >= wanted) return;
  Weight sum = with - own;
  for (int i = 0; i < kEach; ++i) {
    const int at = kClasses - 1 - (lane * kEach + i);
    if (sum + shared.classes[at] >= wanted) {
      shared.found = static_cast<Weight>(at);
      shared.left = wanted - sum;
      return;
    }
    sum += shared.classes[at];
  }
}

/// The key at which the sum of `value` over tokens within `cut`, from the highest key on, reaches `wanted`;
/// as its ties, what is wanted of that key's own. `cut` itself, with all of its ties, if the sum does not.
template <typename T, typename Value>
__device__ Cut reach(const Scores<T>& scores, std::int64_t cols, const Cut& cut, Weight tie_value,
                     Weight wanted, Shared& shared, Value value) {
  std::uint32_t prefix = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    const std::uint32_t mask = shift == 24 ? 0u : ~0u << (shift + 8);
    for (int i = static_cast<int>(threadIdx.x); i < kClasses; i += kThreads) shared.classes[i] = 0;
    __syncthreads();
    for (std::int64_t t = threadIdx.x; t < cols; t += kThreads) {
      const std::uint32_t key = key_of(scores(t));
      if (key > cut.key && (key & mask) == prefix) atomicAdd(&shared.classes[key >> shift & 255u], value(t));
    }
    if (threadIdx.x == 0 && cut.ties > 0 && (cut.key & mask) == prefix)
      atomicAdd(&shared.classes[cut.key >> shift & 255u], cut.ties * tie_value);
    __syncthreads();
    if (threadIdx.x < kWarp) find_class(wanted, shared);
    __syncthreads();
    const Weight found = shared.found;
    if (found == kClasses) return {cut.key, cut.ties * tie_value};
    prefix |= static_cast<std::uint32_t>(found) << shift;
    wanted = shared.left;
    __syncthreads();
  }
  return {prefix, wanted};
}

/// Draws one token of what `cut` leaves: walks the vocabulary until the sum of weights passes `uniform` of
/// the whole. Each warp has a part of the row. -1: nothing has a weight.
template <typename T>
__device__ std::int64_t walk(const Scores<T>& scores, const Weight* weights, std::int64_t cols,
                             const Cut& cut, double uniform, Shared& shared) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t part = ceil_div(ceil_div(cols, std::int64_t{kWarps}), std::int64_t{kWarp}) * kWarp;
  const std::int64_t begin = part * warp, end = begin + part < cols ? begin + part : cols;
  // Ties of the warps before this one.
  Weight ties = 0;
  if (cut.ties > 0) {
    for (std::int64_t t = begin + lane; t < end; t += kWarp) ties += key_of(scores(t)) == cut.key ? 1 : 0;
    ties = detail::warp_reduce(ties, detail::Plus{});
    if (lane == 0) shared.weights[warp] = ties;
    __syncthreads();
    ties = 0;
    for (int w = 0; w < warp; ++w) ties += shared.weights[w];
    __syncthreads();
  }
  // Of this lane's token among 32 at once, the same for all lanes of the warp: `seen` ties lie before them.
  const auto weight_at = [&](std::int64_t t, Weight& seen) {
    const std::uint32_t key = t < end ? key_of(scores(t)) : kNoKey;
    const unsigned equal = __ballot_sync(kAll, cut.ties > 0 && t < end && key == cut.key);
    const Weight before = seen + static_cast<Weight>(__popc(equal & ((1u << lane) - 1u)));
    seen += static_cast<Weight>(__popc(equal));
    const bool stays = key > cut.key || ((equal >> lane & 1u) != 0 && before < cut.ties);
    return stays ? weights[t] : Weight{0};
  };
  Weight own = 0, seen = ties;
  for (std::int64_t t = begin; t < begin + part; t += kWarp) own += weight_at(t + lane, seen);
  own = detail::warp_reduce(own, detail::Plus{});
  if (lane == 0) shared.weights[warp] = own;
  if (threadIdx.x == 0) shared.found = ~Weight{0};
  __syncthreads();
  Weight before = 0, total = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) before = total;
    total += shared.weights[w];
  }
  if (total > 0) {
    auto passed = static_cast<Weight>(uniform * static_cast<double>(total));
    passed = passed < total ? passed : total - 1;
    if (before <= passed && passed < before + own) {  // of one warp, as a whole
      seen = ties;
      for (std::int64_t t = begin; t < begin + part; t += kWarp) {
        const Weight weight = weight_at(t + lane, seen);
        const Weight with = before + sum_up_to(weight);
        const unsigned past = __ballot_sync(kAll, with > passed);
        if (past != 0) {
          if (lane == 0) shared.found = static_cast<Weight>(t + __ffs(static_cast<int>(past)) - 1);
          break;
        }
        before = __shfl_sync(kAll, with, kWarp - 1);
      }
    }
  }
  __syncthreads();
  return static_cast<std::int64_t>(shared.found);
}

/// The token of a row that is drawn at random. `top`: its largest score.
template <typename T>
__device__ std::int64_t draw(const SampleTokens& p, const SamplingRow& rule, const Scores<T>& scores,
                             float top, Shared& shared) {
  Weight* const weights = reinterpret_cast<Weight*>(p.weights) + std::int64_t{blockIdx.x} * p.cols;
  int bits = 1;
  while (bits < 40 && std::int64_t{1} << bits < p.cols) ++bits;
  const double scale = static_cast<double>(Weight{1} << (62 - bits));
  const auto weight_of = [&](float score) {
    const double x = (static_cast<double>(score) - static_cast<double>(top)) / rule.temperature;
    return static_cast<Weight>(exp(x) * scale + 0.5);
  };
  for (std::int64_t t = threadIdx.x; t < p.cols; t += kThreads) {
    const float score = scores(t);
    weights[t] = score == -INFINITY ? 0 : weight_of(score);
  }
  __syncthreads();
  Cut cut;
  if (rule.top_k > 0 && rule.top_k < p.cols)
    cut = reach(scores, p.cols, cut, 0, static_cast<Weight>(rule.top_k), shared,
                [](std::int64_t) { return Weight{1}; });
  if (rule.top_p > 0.0) {
    const Weight tie = cut.ties > 0 ? weight_of(score_of(cut.key)) : 0;
    Weight total = 0;
    for (std::int64_t t = threadIdx.x; t < p.cols; t += kThreads)
      total += key_of(scores(t)) > cut.key ? weights[t] : 0;
    total = sum_of_block(total, shared) + cut.ties * tie;
    auto wanted = static_cast<Weight>(ceil(rule.top_p * static_cast<double>(total)));
    wanted = wanted < total ? (wanted > 0 ? wanted : 1) : total;
    const Cut reached =
        reach(scores, p.cols, cut, tie, wanted, shared, [&](std::int64_t t) { return weights[t]; });
    const Weight each = weight_of(score_of(reached.key));
    if (each > 0) cut = {reached.key, ceil_div(reached.ties, each)};
  }
  const double uniform = sampling_uniform(rule.seed, rule.sample, rule.position);
  return walk(scores, weights, p.cols, cut, uniform, shared);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1) sample_tokens_kernel(const SampleTokens p) {
  __shared__ Shared shared;
  const std::int64_t r = blockIdx.x;
  const SamplingRow rule = p.row[r];
  const std::int64_t words = p.words();
  const bool penalised = p.seen != nullptr && rule.repetition_penalty != 1.0f;
  const bool goes_on = p.stops != nullptr && rule.new_tokens < rule.min_new_tokens;
  const Scores<T> scores{static_cast<const T*>(p.logits) + r * p.ld, penalised ? p.seen + r * words : nullptr,
                         goes_on ? p.stops + r * words : nullptr, rule.repetition_penalty};
  // The likeliest token, of equal ones the first; the largest logit; and whether there is one that is none.
  Weight best = 0;
  float largest = -INFINITY;
  int unsound = 0;
  for (std::int64_t t = threadIdx.x; t < p.cols; t += kThreads) {
    const float raw = scores.raw(t);
    unsound |= raw < INFINITY ? 0 : 1;
    largest = fmaxf(largest, raw);
    const Weight key = Weight{key_of(scores(t))} << 32 | (0xffffffffu - static_cast<std::uint32_t>(t));
    best = key > best ? key : best;
  }
  const bool sound = __syncthreads_or(unsound) == 0;
  best = detail::block_reduce(best, Weight{0}, shared.weights, Higher{});
  largest = block_max(largest, shared.floats);
  const auto top_key = static_cast<std::uint32_t>(best >> 32);
  DrawnToken drawn;
  std::int64_t token = 0xffffffffu - static_cast<std::uint32_t>(best);
  if (!sound) {
    drawn.failure = DrawnToken::not_finite;
  } else if (top_key == kNoKey) {
    drawn.failure = DrawnToken::no_token_left;
  } else {
    if (rule.top_k != 1) token = draw(p, rule, scores, score_of(top_key), shared);
    if (token < 0) drawn.failure = DrawnToken::no_token_left;
  }
  if (drawn.failure != DrawnToken::none) token = 0;
  if (rule.logprob != 0 && sound) {
    double sum = 0;
    for (std::int64_t t = threadIdx.x; t < p.cols; t += kThreads)
      sum += static_cast<double>(expf(scores.raw(t) - largest));
    sum = block_sum(sum, shared.doubles);
    drawn.logprob =
        static_cast<float>(static_cast<double>(scores.raw(token)) - static_cast<double>(largest) - log(sum));
  }
  __syncthreads();  // every thread has read what now moves on
  if (threadIdx.x != 0) return;
  drawn.token = static_cast<std::int32_t>(token);
  p.drawn[r] = drawn;
  p.token[r] = drawn.token;
  ++p.position[r];
  ++p.length[r];
  ++p.row[r].position;
  ++p.row[r].new_tokens;
  p.row[r].top_p = fmax(rule.top_p * rule.top_p_decay, rule.top_p_bound);
  if (p.seen != nullptr) p.seen[r * words + token / 32] |= 1u << (token % 32);
}

/// A block for a position of a text. A head is `cols` words of `per_word` elements.
template <typename Word>
__global__ void __launch_bounds__(kThreads)
    append_to_cache_kernel(const AppendToCache p, int cols, int per_word) {
  const std::int64_t r = blockIdx.x % p.rows, i = blockIdx.x / p.rows;
  const std::int64_t position = p.position_of(i, r);
  if (position < 0) return;
  const std::int64_t from = i * p.x_position + r * p.x_row, to = p.kept(r, position);
  const int words = static_cast<int>(p.heads) * cols;
  for (int w = static_cast<int>(threadIdx.x); w < words; w += static_cast<int>(blockDim.x)) {
    const int head = w / cols, col = w % cols;
    const std::int64_t source = (from + head * p.x_head) / per_word + col;
    const std::int64_t target = (to + head * p.kept_head) / per_word + col;
    detail::check_access(static_cast<const Word*>(p.key) + source);
    detail::check_access(static_cast<Word*>(p.kept_key) + target);
    static_cast<Word*>(p.kept_key)[target] = static_cast<const Word*>(p.key)[source];
    static_cast<Word*>(p.kept_value)[target] = static_cast<const Word*>(p.value)[source];
  }
  if (p.begin != nullptr && threadIdx.x == 0)
    p.begin[r] = static_cast<std::int32_t>(position + 1 > p.window ? position + 1 - p.window : 0);
}

/// Whether heads are whole words of 16 bytes, wherever they begin.
bool has_wide_words(const AppendToCache& p) {
  const std::int64_t elements = 16 / static_cast<std::int64_t>(size_of(p.dtype));
  for (const std::int64_t step :
       {p.head_dim, p.x_position, p.x_row, p.x_head, p.kept_page, p.kept_head, p.kept_position}) {
    if (step % elements != 0) return false;
  }
  for (const void* x :
       {p.key, p.value, static_cast<const void*>(p.kept_key), static_cast<const void*>(p.kept_value)}) {
    if (!is_aligned(x, 16)) return false;
  }
  return true;
}

}  // namespace

void sample_tokens(const SampleTokens& p, const Launch& where) {
  visit_float(p.dtype, "sample_tokens", [&](auto x) {
    launch(sample_tokens_kernel<decltype(x)>, dim3(static_cast<unsigned>(p.rows)), dim3(kThreads), 0, where,
           p);
  });
}

void append_to_cache(const AppendToCache& p, const Launch& where) {
  const dim3 grid(static_cast<unsigned>(p.positions * p.rows));
  const auto start = [&](auto kernel, int per_word) {
    const auto cols = static_cast<int>(p.head_dim) / per_word;
    const int words = static_cast<int>(p.heads) * cols;
    const dim3 block(static_cast<unsigned>(std::clamp(ceil_div(words, kWarp) * kWarp, kWarp, kThreads)));
    launch(kernel, grid, block, 0, where, p, cols, per_word);
  };
  if (has_wide_words(p)) {
    start(append_to_cache_kernel<uint4>, 16 / static_cast<int>(size_of(p.dtype)));
  } else if (size_of(p.dtype) == 4) {
    start(append_to_cache_kernel<std::uint32_t>, 1);
  } else {
    start(append_to_cache_kernel<std::uint16_t>, 1);
  }
}

TESSERA_KERNEL_FILE(append_to_cache_kernel<std::uint32_t>);

}  // namespace tessera::kernels::cuda
