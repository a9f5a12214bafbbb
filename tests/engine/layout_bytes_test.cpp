/// Bytes sent by real steps, by axis, and those of plans, by term, against formulas of this file alone.

#include "tessera/engine/plan.hpp"
#include "tests/engine/engine_support.hpp"
#include "tests/engine/layout_support.hpp"

namespace tessera::test {
namespace {

/// What a case says, in numbers. The model: h wide, L layers, odd vocabulary, positions for GPT-2.
struct BytesCase {
  const char* name;
  bool llama = false;
  int t = 1, p = 1, d = 1;
  bool sp = false;
  int zero = 1;
  bool half = false, half_residual = false;
  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
  int chunks = 1;
  int kv = 4;
  bool tied = true;
  Recompute recompute = Recompute::none;
  RecomputeMethod method = RecomputeMethod::uniform;
  int segment = 1;
  bool partition = false;
};
void PrintTo(const BytesCase& c, std::ostream* out) { *out << c.name; }

constexpr std::int64_t kWidth = 24, kHeads = 8, kHeadDim = 6, kFfn = 40, kVocab = 211, kPositions = 20,
                       kSeq = 16, kMicro = 3, kGlobal = 24, kLayers = 6;

Config config_of(const BytesCase& c) {
  Settings config;
  config.model = {.family = c.llama ? Family::llama : Family::gpt2,
                  .num_layers = kLayers,
                  .hidden_size = kWidth,
                  .num_heads = kHeads,
                  .num_kv_heads = c.kv,
                  .head_dim = kHeadDim,
                  .ffn_hidden_size = kFfn,
                  .vocab_size = kVocab,
                  .max_positions = kPositions};
  if (!c.llama) config.model.num_kv_heads = kHeads;
  config.model.tied_head = c.tied;
  config.training.seq_length = kSeq;
  config.training.micro_batch_size = kMicro;
  config.training.global_batch_size = kGlobal;
  config.training.precision = c.half ? Precision::bf16 : Precision::fp32;
  config.training.fp32_residual = !c.half_residual;
  config.training.recompute = c.recompute;
  config.training.recompute_method = c.method;
  config.training.recompute_layers = c.segment;
  config.training.recompute_partition = c.partition;
  config.parallel.tensor = c.t;
  config.parallel.sequence = c.sp;
  config.parallel.pipeline = c.p;
  config.parallel.data = c.d;
  config.parallel.zero_stage = c.zero;
  config.parallel.schedule = c.schedule;
  if (c.schedule == PipelineSchedule::interleaved) config.parallel.virtual_stages = c.chunks;
  // Layers are shared out evenly: the formulas below need no cost model.
  if (c.p * c.chunks > 1) {
    std::string layout;
    for (int i = 0; i < c.p * c.chunks; ++i)
      layout += tessera::detail::concat(i > 0 ? "," : "", kLayers / (c.p * c.chunks));
    config.parallel.pipeline_layout = layout;
  }
  config.device.threads = 1;
  return config;
}

/// Elements of rank `rank` when `n` are shared out, longer parts first.
std::int64_t share_of(std::int64_t n, int rank, int ranks) { return n / ranks + (rank < n % ranks ? 1 : 0); }
/// An all-reduce of n elements: each rank sends the parts of others to them, and its own sum to all others.
std::int64_t all_reduce(std::int64_t n, int rank, int ranks) {
  const std::int64_t own = share_of(n, rank, ranks);
  return n - own + (ranks - 1) * own;
}
std::int64_t round_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

using Terms = std::map<std::pair<std::string, std::string>, std::int64_t>;

/// A parameter of one rank: elements, and what decides where its gradient goes.
struct Weight {
  std::int64_t elements = 0;
  bool fp32_read = false;     ///< kernels read it in fp32
  bool partial = false;       ///< summed over tensor ranks
  bool tied = false;          ///< summed over first and last stage
  std::int64_t reserved = 0;  ///< elements set aside; 0 = as many
  /// Runs of elements that `copies` tensor ranks hold.
  std::vector<std::pair<std::int64_t, std::int64_t>> copied = {};
};

struct Place {
  int tp, pp, dp;
};

class Formula {
 public:
  Formula(const BytesCase& c, const Place& at) : c_(c), at_(at) {
    for (int chunk = 0; chunk < c.chunks; ++chunk) {
      const bool folded = c.schedule == PipelineSchedule::zb_v && chunk == 1;
      const int piece = folded ? 2 * c.p - 1 - at.pp : chunk * c.p + at.pp;
      pieces_.push_back(piece);
      embedding_ |= piece == 0;
      head_ |= piece == c.p * c.chunks - 1;
    }
  }

  Terms terms() {
    if (c_.t > 1) tensor_terms();
    if (c_.p > 1) pipeline_terms();
    if (c_.t * c_.p * c_.d > 1) {
      const int ranks = c_.t * c_.p * c_.d, rank = at_.tp + c_.t * (at_.dp + c_.d * at_.pp);
      add("world", "agreement on the batch", 64 * (ranks - 1));
      for (const char* name : {"loss", "gradient norm"}) add("world", name, 8 * all_reduce(1, rank, ranks));
    }
    weight_terms();
    return terms_;
  }

 private:
  void add(const char* axis, const char* name, std::int64_t bytes) {
    if (bytes > 0) terms_[{axis, name}] += bytes;
  }
  std::int64_t micro_batches() const { return kGlobal / (kMicro * c_.d); }
  std::int64_t element() const { return c_.half ? 2 : 4; }
  std::int64_t stream_element() const { return c_.half && c_.half_residual ? 2 : 4; }

  /// One activation b C e: all-reduce 2 (t-1)/t of it, reduce-scatter and all-gather (t-1)/t.
  std::int64_t sum_or_part(std::int64_t bytes_per_element) const {
    const std::int64_t n = kMicro * kSeq * kWidth;
    return bytes_per_element * (c_.sp ? n / c_.t * (c_.t - 1) : all_reduce(n, at_.tp, c_.t));
  }

  void tensor_terms() {
    const std::int64_t m = micro_batches(), layers = kLayers / c_.p, one = sum_or_part(element());
    add("tp", "layers, forward", m * layers * one * (c_.sp ? 4 : 2));
    add("tp", "layers, backward", m * layers * one * (c_.sp ? 6 : 2));
    if (c_.recompute == Recompute::full) {
      const std::int64_t per_piece = kLayers / (c_.p * c_.chunks);
      const bool block = c_.method == RecomputeMethod::block;
      const std::int64_t again = block ? std::min<std::int64_t>(c_.segment, per_piece) : per_piece;
      const std::int64_t segments = block ? again : (per_piece + c_.segment - 1) / c_.segment;
      add("tp", "layers, recomputed forward", m * c_.chunks * again * one * (c_.sp ? 4 : 2));
      if (c_.partition) {
        const std::int64_t own = share_of(kMicro * kSeq * kWidth, at_.tp, c_.t);
        add("tp", "inputs of recomputed segments",
            m * c_.chunks * segments * (c_.t - 1) * own * stream_element());
      }
    }
    if (embedding_) {
      add("tp", "embedding, forward", m * sum_or_part(stream_element()));
      if (c_.sp) add("tp", "embedding, backward", m * sum_or_part(stream_element()));
    }
    if (head_) {
      if (c_.sp) add("tp", "head, forward", m * one);
      add("tp", "head, backward", m * one);
      add("tp", "vocabulary loss", m * kMicro * kSeq * 2 * 4 * (c_.t - 1));
    }
  }

  void pipeline_terms() {
    const std::int64_t message = kMicro * kSeq * kWidth * stream_element() / (c_.sp ? c_.t : 1);
    for (const int piece : pieces_) {
      const int last = c_.p * c_.chunks - 1;
      // zb-v turns round on the last stage: pieces p-1 and p are both there.
      const bool folds = c_.schedule == PipelineSchedule::zb_v;
      if (piece < last && !(folds && piece == c_.p - 1)) add("pp", "activations", micro_batches() * message);
      if (piece > 0 && !(folds && piece == c_.p)) add("pp", "gradients", micro_batches() * message);
    }
  }

  void add_norm(std::vector<Weight>& list) const {
    for (int i = 0; i < (c_.llama ? 1 : 2); ++i) list.push_back({kWidth, true, c_.sp});
  }

  /// In the order the model registers them.
  std::vector<Weight> weights() const {
    std::vector<Weight> list;
    const std::int64_t table = kWidth * share_of(kVocab, at_.tp, c_.t);
    const std::int64_t largest = kWidth * share_of(kVocab, 0, c_.t);
    if (embedding_) {
      list.push_back({table, true, false, c_.tied && !head_, largest});
      if (!c_.llama) list.push_back({kPositions * kWidth, true, c_.sp});
    }
    const std::int64_t kv_heads = c_.llama ? c_.kv : kHeads;
    const std::int64_t q = kHeads / c_.t * kHeadDim,
                       kv = std::max<std::int64_t>(1, kv_heads / c_.t) * kHeadDim;
    const std::int64_t wide = (c_.llama ? 2 : 1) * kFfn / c_.t;
    std::vector<Weight> layers;
    for (std::int64_t i = 0; i < kLayers / c_.p; ++i) {
      add_norm(list);
      Weight qkv{(q + 2 * kv) * kWidth};
      if (kv_heads < c_.t) qkv.copied = {{q * kWidth, 2 * kv * kWidth}};
      list.push_back(qkv);
      if (!c_.llama) list.push_back({q + 2 * kv});
      list.push_back({q * kWidth});
      if (!c_.llama) list.push_back({kWidth});
      add_norm(list);
      list.push_back({wide * kWidth});
      if (!c_.llama) list.push_back({wide});
      list.push_back({kFfn / c_.t * kWidth});
      if (!c_.llama) list.push_back({kWidth});
    }
    if (head_) {
      add_norm(list);
      if (!c_.tied) list.push_back({table, false, false, false, largest});
      if (c_.tied && !embedding_) list.push_back({table, true, false, true, largest});
    }
    return list;
  }

  /// Flat buffers: three kinds apart, last parameter first, 64 elements a step, ends a multiple of 64 d.
  void weight_terms() {
    const std::vector<Weight> list = weights();
    std::int64_t partial = 0, tied = 0, copied = 0;
    for (const int kind : {0, 1, 2}) {  // linears, what is read in fp32, the tied table
      std::int64_t length = 0;
      std::vector<std::pair<std::int64_t, const Weight*>> placed;
      for (auto w = list.rbegin(); w != list.rend(); ++w) {
        if ((w->tied ? 2 : w->fp32_read ? 1 : 0) != kind) continue;
        placed.emplace_back(length, &*w);
        length += round_up(std::max(w->elements, w->reserved), 64);
      }
      length = round_up(length, 64 * c_.d);
      if (length == 0) continue;
      const bool shares = c_.zero == 1 && c_.d > 1;
      const std::int64_t begin = shares ? length / c_.d * at_.dp : 0;
      const std::int64_t end = shares ? begin + length / c_.d : length;
      const auto inside = [&](std::int64_t from, std::int64_t count) {
        return std::max<std::int64_t>(0, std::min(from + count, end) - std::max(from, begin));
      };
      for (const auto& [offset, w] : placed) {
        if (w->partial) partial += inside(offset, w->elements);
        if (w->tied) tied += inside(offset, w->elements);
        for (const auto& [from, count] : w->copied) copied += inside(offset + from, count);
      }
      if (c_.d == 1) continue;
      const std::int64_t others = length / c_.d * (c_.d - 1);
      if (shares) {
        add("dp", "gradients, reduce-scatter", 4 * others);
        add("dp", "weights, all-gather", (kind == 0 ? element() : 4) * others);
      } else {
        add("dp", "gradients, all-reduce", 2 * 4 * others);
      }
    }
    if (c_.t > 1) add("tp", "gradients of norms and positions", 4 * all_reduce(partial, at_.tp, c_.t));
    if (copied > 0) {
      const int copies = c_.t / c_.kv;
      add(copies == c_.t ? "tp" : "tp_block", "gradients of shared key-value heads",
          4 * all_reduce(copied, at_.tp % copies, copies));
    }
    if (tied > 0) add("embedding", "gradients of the tied table", 4 * all_reduce(tied, at_.pp > 0, 2));
  }

  const BytesCase& c_;
  Place at_;
  std::vector<int> pieces_;
  bool embedding_ = false, head_ = false;
  Terms terms_;
};

std::map<std::string, std::int64_t> by_axis(const Terms& terms) {
  std::map<std::string, std::int64_t> sums;
  for (const auto& [key, bytes] : terms) sums[key.first] += bytes;
  return sums;
}

class LayoutBytes : public ::testing::TestWithParam<BytesCase> {};

TEST_P(LayoutBytes, CountersEqualTheFormulas) {
  const BytesCase& c = GetParam();
  const Config config = config_of(c);
  const int ranks = c.t * c.p * c.d;
  const Plan plan = make_plan(config, ranks);
  const Batch whole = random_batch(kGlobal, kSeq, 9, kVocab);
  std::mutex mutex;
  run_local(ranks, [&](std::shared_ptr<Communicator> world) {
    const auto engine = build_engine(config, true, world);
    const MeshCoordinates& at = engine->mesh().coordinates();
    const Terms expected = Formula(c, {at.tp, at.pp, at.dp}).terms();
    const Batch own = data_part(whole, at.dp, c.d, kMicro);
    for (int step = 0; step < 2; ++step) {
      const StepReport report = engine->step(own);
      std::map<std::string, std::int64_t> sent;
      for (const AxisTraffic& axis : report.traffic) {
        if (axis.bytes_sent > 0) sent[axis.axis] += static_cast<std::int64_t>(axis.bytes_sent);
      }
      const std::lock_guard lock(mutex);
      EXPECT_EQ(sent, by_axis(expected)) << "rank " << world->rank() << ", step " << step;
    }
    Terms planned;
    for (const TrafficTerm& term : plan.ranks[static_cast<std::size_t>(world->rank())].traffic)
      planned[{term.axis, term.name}] += term.bytes;
    const std::lock_guard lock(mutex);
    EXPECT_EQ(by_axis(planned), by_axis(expected)) << "rank " << world->rank();
  });
}

constexpr auto kFull = Recompute::full;
const BytesCase kBytesCases[] = {
    {.name = "tp2", .t = 2},
    {.name = "tp4_llama", .llama = true, .t = 4},
    {.name = "tp4_sp", .t = 4, .sp = true},
    {.name = "tp2_bf16", .llama = true, .t = 2, .half = true, .tied = false},
    {.name = "tp2_sp_bf16_residual", .t = 2, .sp = true, .half = true, .half_residual = true},
    {.name = "pp2_tied", .p = 2},
    {.name = "pp3_untied_bf16", .llama = true, .p = 3, .half = true, .tied = false},
    {.name = "pp2_interleaved", .p = 2, .schedule = PipelineSchedule::interleaved, .chunks = 3},
    {.name = "pp3_zb_v", .p = 3, .schedule = PipelineSchedule::zb_v, .chunks = 2},
    {.name = "pp2_zb_h1", .p = 2, .half = true, .half_residual = true, .schedule = PipelineSchedule::zb_h1},
    {.name = "dp2_zero0", .d = 2, .zero = 0},
    {.name = "dp4_zero1", .d = 4},
    {.name = "dp4_zero0_bf16", .llama = true, .d = 4, .zero = 0, .half = true},
    {.name = "dp8_zero1_bf16", .d = 8, .half = true},
    {.name = "tp2_sp_dp4_bf16", .t = 2, .d = 4, .sp = true, .half = true},
    {.name = "copies2_dp2", .llama = true, .t = 4, .d = 2, .kv = 2},
    {.name = "copies4_sp", .llama = true, .t = 4, .sp = true, .kv = 1},
    {.name = "pp2_dp2_tied", .p = 2, .d = 2, .half = true},
    {.name = "tp2_sp_pp2_dp2", .t = 2, .p = 2, .d = 2, .sp = true},
    {.name = "tp2_sp_pp3_dp2_copies", .llama = true, .t = 2, .p = 3, .d = 2, .sp = true, .kv = 1},
    {.name = "tp2_pp3_dp2_zero0_zb_v",
     .t = 2,
     .p = 3,
     .d = 2,
     .zero = 0,
     .schedule = PipelineSchedule::zb_v,
     .chunks = 2},
    {.name = "tp2_sp_full", .t = 2, .sp = true, .recompute = kFull, .segment = 4},
    {.name = "tp4_full_block_partition",
     .t = 4,
     .recompute = kFull,
     .method = RecomputeMethod::block,
     .segment = 2,
     .partition = true},
    {.name = "tp2_pp2_full_partition",
     .llama = true,
     .t = 2,
     .p = 2,
     .recompute = kFull,
     .segment = 2,
     .partition = true},
    {.name = "tp2_sp_selective", .t = 2, .sp = true, .recompute = Recompute::selective},
};
INSTANTIATE_TEST_SUITE_P(All, LayoutBytes, ::testing::ValuesIn(kBytesCases),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace tessera::test
