#include "kernels/api/attention.hpp"

#include <algorithm>
#include <atomic>

#include "kernels/cpu/parallel.hpp"
#include "kernels/cpu/vector/attention.hpp"

namespace tessera::kernels::cpu {
namespace {

constexpr std::int64_t kLine = 64;  ///< bytes arrays start at multiples of
/// dK and dV are split into partial sums where there are fewer (batch, KV head) pairs than this. It must not
/// depend on the number of threads: the sums would.
constexpr std::int64_t kBackwardTasks = 8;
constexpr std::int64_t kForwardTasks = 16;  ///< forward is cut into more tasks than this where it can be

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// Cuts a buffer into arrays; from a null buffer it only counts their bytes.
class Arena {
 public:
  explicit Arena(void* buffer) : base_(static_cast<char*>(buffer)) {
    if (base_)
      base_ += (kLine - static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(base_) % kLine)) % kLine;
  }
  template <typename T = float>
  T* take(std::int64_t count) {
    char* array = base_ ? base_ + used_ : nullptr;
    used_ += ceil_div(count * static_cast<std::int64_t>(sizeof(T)), kLine) * kLine;
    return reinterpret_cast<T*>(array);
  }
  /// Bytes to ask for, whatever the alignment of the buffer.
  std::size_t bytes() const { return static_cast<std::size_t>(used_ + kLine); }

 private:
  char* base_;
  std::int64_t used_ = 0;
};

/// How a call is cut into tasks: a function of its shape alone.
struct Plan {
  std::int64_t groups;  ///< (batch, KV head) pairs
  std::int64_t width;   ///< head_dim in whole registers of the widest instruction set
  std::int64_t tiles;   ///< query tiles of a group
  std::int64_t rows;    ///< query rows of a group

  explicit Plan(const AttentionShape& shape)
      : groups(shape.batch * shape.kv_heads),
        width(ceil_div(shape.head_dim, 16) * 16),
        tiles(shape.heads / std::max<std::int64_t>(shape.kv_heads, 1) * ceil_div(shape.seq_q, kQueryTile)),
        rows(shape.heads / std::max<std::int64_t>(shape.kv_heads, 1) * shape.seq_q) {}

  /// Query tiles of a forward task: many share the packing of keys, but a few tasks must be left for every
  /// thread.
  int forward_tiles() const {
    return static_cast<int>(std::clamp<std::int64_t>(groups * tiles / kForwardTasks, 2, kForwardTiles));
  }
  std::int64_t forward_chunks() const { return ceil_div(tiles, forward_tiles()); }
  std::int64_t backward_chunks() const { return ceil_div(tiles, kBackwardTiles); }
  /// Partial sums of dK and dV per group; each gets at least two chunks.
  std::int64_t parts() const {
    if (groups >= kBackwardTasks || groups == 0) return 1;
    return std::max<std::int64_t>(1, std::min(ceil_div(kBackwardTasks, groups), backward_chunks() / 2));
  }
};

TileRange range_of(const AttentionShape& shape, std::int64_t group, std::int64_t first, std::int64_t total,
                   int most) {
  return {group / shape.kv_heads, group % shape.kv_heads, first,
          static_cast<int>(std::min<std::int64_t>(most, total - first))};
}

bool decodes(const AttentionShape& shape) {
  return shape.seq_q <= kDecodeQueries && shape.dropout == 0.0f && shape.bias == nullptr;
}

ForwardScratch forward_scratch(Arena& arena, const AttentionShape& shape, const Plan& plan) {
  const std::int64_t rows = plan.forward_tiles() * kQueryTile;
  ForwardScratch scratch;
  scratch.width = plan.width;
  scratch.tiles = arena.take<QueryTile>(plan.forward_tiles());
  scratch.q_t = arena.take(rows * shape.head_dim);
  scratch.o = arena.take(rows * plan.width);
  scratch.max = arena.take(rows);
  scratch.sum = arena.take(rows);
  scratch.k = arena.take(kKeyBlock * plan.width);
  scratch.v = arena.take(kKeyBlock * plan.width);
  scratch.scores = arena.take(kKeyBlock * kQueryTile);
  scratch.bias = arena.take(shape.bias != nullptr ? kBiasWindow : 0);
  return scratch;
}

DecodeScratch decode_scratch(Arena& arena, const Plan& plan) {
  DecodeScratch scratch;
  scratch.width = plan.width;
  scratch.q = arena.take(kDecodeRows * plan.width);
  scratch.o = arena.take(kDecodeRows * plan.width);
  scratch.k = arena.take(kKeyBlock * plan.width);
  scratch.v = arena.take(kKeyBlock * plan.width);
  scratch.scores = arena.take(kDecodeRows * kKeyBlock);
  return scratch;
}

BackwardScratch backward_scratch(Arena& arena, const AttentionShape& shape, const Plan& plan) {
  const std::int64_t rows = kBackwardTiles * kQueryTile;
  BackwardScratch scratch;
  scratch.width = plan.width;
  scratch.tiles = arena.take<QueryTile>(kBackwardTiles);
  scratch.q = arena.take(rows * plan.width);
  scratch.q_t = arena.take(rows * shape.head_dim);
  scratch.d_o = arena.take(rows * plan.width);
  scratch.d_o_t = arena.take(rows * shape.head_dim);
  scratch.dq = arena.take(rows * plan.width);
  scratch.lse = arena.take(rows);
  scratch.delta = arena.take(rows);
  scratch.k = arena.take(kKeyBlock * plan.width);
  scratch.v = arena.take(kKeyBlock * plan.width);
  scratch.p = arena.take(kKeyBlock * kQueryTile);
  scratch.ds = arena.take(kKeyBlock * kQueryTile);
  scratch.bias = arena.take(shape.bias != nullptr ? kBiasWindow : 0);
  return scratch;
}

/// Where dK and dV are summed up: one slot per thread, or per task where a group's sums come from several
/// tasks.
struct KvSums {
  std::int64_t stride;  ///< from one slot's dK (or dV) to the next slot's
  float* sums;

  KvSums(Arena& arena, const AttentionShape& shape, const Plan& plan, int threads)
      : stride(shape.seq_k * plan.width) {
    const std::int64_t slots =
        plan.parts() == 1 ? std::min<std::int64_t>(threads, plan.groups) : plan.groups * plan.parts();
    sums = arena.take(2 * slots * stride);
  }
  float* dk(std::int64_t slot) const { return sums + 2 * slot * stride; }
  float* dv(std::int64_t slot) const { return dk(slot) + stride; }
  KvPartials partials(std::int64_t slot, const Plan& plan) const {
    return {dk(slot), dv(slot), plan.parts(), 2 * stride, plan.width};
  }
};

/// Sums of the bias's gradient, one row per (batch, KV head, part, head of its group).
struct BiasSums {
  std::int64_t members, row;
  float* sums;

  BiasSums(Arena& arena, const AttentionShape& shape, const Plan& plan)
      : members(shape.heads / std::max<std::int64_t>(shape.kv_heads, 1)), row(bias_row(shape)) {
    sums = arena.take(shape.bias != nullptr ? plan.groups * plan.parts() * members * row : 0);
  }
  float* of(std::int64_t task) const { return sums + task * members * row; }
};

/// dbias of one head: its sums, sample by sample and part by part.
void store_bias_gradient(const AttentionBackward& call, const BiasSums& sums, std::int64_t head,
                         std::int64_t parts) {
  const AttentionShape& shape = call.shape;
  const std::int64_t count = shape.seq_q + shape.seq_k - 1;
  for (std::int64_t i = 0; i < count; ++i) {
    float total = 0.0f;
    for (std::int64_t batch = 0; batch < shape.batch; ++batch) {
      const std::int64_t group = batch * shape.kv_heads + head / sums.members;
      for (std::int64_t part = 0; part < parts; ++part)
        total += sums.of(group * parts + part)[head % sums.members * sums.row + i];
    }
    call.dbias[i * shape.heads + head] = total;
  }
}

/// Calls body(task, thread) for every task: each thread takes the next one as it gets free, because tasks
/// differ in size. Results do not depend on who takes which.
template <typename Body>
void for_each_task(int threads, std::int64_t tasks, Body body) {
  std::atomic<std::int64_t> next{0};
  parallel_for(threads, std::min<std::int64_t>(threads, tasks), 1,
               [&](std::int64_t, std::int64_t, int thread) {
                 for (std::int64_t task = next++; task < tasks; task = next++) body(task, thread);
               });
}

}  // namespace

std::size_t attention_forward_workspace(const AttentionShape& shape, int threads) {
  const Plan plan(shape);
  Arena arena(nullptr);
  for (int thread = 0; thread < threads; ++thread) {
    if (decodes(shape)) {
      decode_scratch(arena, plan);
    } else {
      forward_scratch(arena, shape, plan);
    }
  }
  return arena.bytes();
}

std::size_t attention_backward_workspace(const AttentionShape& shape, int threads) {
  const Plan plan(shape);
  Arena arena(nullptr);
  for (int thread = 0; thread < threads; ++thread) backward_scratch(arena, shape, plan);
  KvSums(arena, shape, plan, threads);
  BiasSums(arena, shape, plan);
  return arena.bytes();
}

void attention_forward(const AttentionForward& call, const Launch& launch) {
  const AttentionShape& shape = call.shape;
  const Plan plan(shape);
  const std::size_t region = (attention_forward_workspace(shape, 1) / kLine - 1) * kLine;
  const auto arena_of = [&](int thread) {
    Arena arena(call.workspace);
    arena.take<char>(static_cast<std::int64_t>(region) * thread);
    return arena;
  };
  if (decodes(shape)) {
    auto* rows = TESSERA_PICK(attention_decode_rows);
    const std::int64_t chunks = ceil_div(plan.rows, kDecodeRows);
    for_each_task(launch.threads, plan.groups * chunks, [&](std::int64_t task, int thread) {
      Arena arena = arena_of(thread);
      rows(call, range_of(shape, task / chunks, task % chunks * kDecodeRows, plan.rows, kDecodeRows),
           decode_scratch(arena, plan));
    });
    return;
  }
  auto* tiles = TESSERA_PICK(attention_forward_tiles);
  const std::int64_t chunks = plan.forward_chunks();
  for_each_task(launch.threads, plan.groups * chunks, [&](std::int64_t task, int thread) {
    // The last queries see the most keys: they go first, so that the threads end together.
    const std::int64_t chunk = chunks - 1 - task % chunks;
    Arena arena = arena_of(thread);
    tiles(call,
          range_of(shape, task / chunks, chunk * plan.forward_tiles(), plan.tiles, plan.forward_tiles()),
          forward_scratch(arena, shape, plan));
  });
}

void attention_backward(const AttentionBackward& call, const Launch& launch) {
  const AttentionShape& shape = call.shape;
  const Plan plan(shape);
  const std::int64_t parts = plan.parts(), chunks = plan.backward_chunks();
  auto* add_tiles = TESSERA_PICK(attention_backward_tiles);
  auto* store_kv = TESSERA_PICK(attention_store_kv_gradients);
  Arena shared(call.workspace);
  const KvSums sums(shared, shape, plan, launch.threads);
  const BiasSums bias_sums(shared, shape, plan);
  for_each_task(launch.threads, plan.groups * parts, [&](std::int64_t task, int thread) {
    const std::int64_t group = task / parts, part = task % parts;
    const std::int64_t slot = parts == 1 ? thread : task;
    Arena arena = shared;
    BackwardScratch scratch;
    for (int i = 0; i <= thread; ++i) scratch = backward_scratch(arena, shape, plan);
    scratch.dk = sums.dk(slot);
    scratch.dv = sums.dv(slot);
    std::fill_n(scratch.dk, 2 * sums.stride, 0.0f);
    if (shape.bias != nullptr) {
      scratch.dbias = bias_sums.of(task);
      std::fill_n(scratch.dbias, bias_sums.members * bias_sums.row, 0.0f);
    }
    for (std::int64_t round = 0; round * parts < chunks; ++round) {
      // Later chunks see more keys: back and forth through the parts evens them out.
      const std::int64_t chunk = round * parts + (round % 2 == 0 ? part : parts - 1 - part);
      if (chunk >= chunks) continue;
      add_tiles(call, range_of(shape, group, chunk * kBackwardTiles, plan.tiles, kBackwardTiles), scratch);
    }
    if (parts == 1) {
      store_kv(call, group / shape.kv_heads, group % shape.kv_heads, 0, shape.seq_k,
               sums.partials(slot, plan));
    }
  });
  if (shape.bias != nullptr) {
    for_each_task(launch.threads, shape.heads,
                  [&](std::int64_t head, int) { store_bias_gradient(call, bias_sums, head, parts); });
  }
  if (parts == 1) return;
  const std::int64_t blocks = ceil_div(shape.seq_k, kKeyBlock);
  for_each_task(launch.threads, plan.groups * blocks, [&](std::int64_t task, int) {
    const std::int64_t group = task / blocks, key = task % blocks * kKeyBlock;
    store_kv(call, group / shape.kv_heads, group % shape.kv_heads, key,
             std::min(shape.seq_k, key + kKeyBlock), sums.partials(group * parts, plan));
  });
}

}  // namespace tessera::kernels::cpu
