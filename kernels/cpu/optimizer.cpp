#include "kernels/cpu/vector/optimizer.hpp"

#include <algorithm>

#include "kernels/cpu/parallel.hpp"

namespace tessera::kernels::cpu {
namespace {

constexpr std::int64_t kGrain = 4096;  // elements: less than this is not worth a thread
static_assert(kGrain % kGroupBlock == 0, "threads begin at whole blocks");

/// Calls body(factors, begin, end) on runs of one group, all threads together on each element of a group
/// once.
template <typename Body>
void for_groups(const GroupsOfElements& groups, std::int64_t n, const Launch& launch, Body&& body) {
  parallel_for(launch.threads, n, kGrain, [&](std::int64_t begin, std::int64_t end, int) {
    const std::uint8_t* of_block = groups.of_block;
    const std::int64_t blocks = (end + kGroupBlock - 1) / kGroupBlock;
    for (std::int64_t block = begin / kGroupBlock; block < blocks;) {
      const std::int64_t first = block;
      while (block < blocks && of_block[block] == of_block[first]) ++block;
      if (of_block[first] == kNoGroup) continue;
      body(groups.factors[of_block[first]], first * kGroupBlock, std::min(end, block * kGroupBlock));
    }
  });
}

}  // namespace

void begin_update(const BeginUpdate& params, const Launch&) { params.run(); }

void update_groups(const UpdateGroups& params, const Launch&) {
  for (int group = 0; group < params.count; ++group) params.run(group);
}

void split_main(const SplitMain& params, const Launch& launch) {
  auto* range = TESSERA_PICK(split_main_range);
  parallel_for(launch.threads, params.n, kGrain,
               [&](std::int64_t begin, std::int64_t end, int) { range(params, begin, end); });
}

void join_main(const JoinMain& params, const Launch& launch) {
  auto* range = TESSERA_PICK(join_main_range);
  parallel_for(launch.threads, params.n, kGrain,
               [&](std::int64_t begin, std::int64_t end, int) { range(params, begin, end); });
}

void adam(const Adam& params, const Launch& launch) {
  if (params.state->skip != 0) return;
  auto* range = TESSERA_PICK(adam_range);
  for_groups(params.groups, params.n, launch,
             [&](const GroupFactors& factors, std::int64_t begin, std::int64_t end) {
               range(params, factors.adam, begin, end);
             });
}

void sgd(const Sgd& params, const Launch& launch) {
  if (params.state->skip != 0) return;
  auto* range = TESSERA_PICK(sgd_range);
  for_groups(params.groups, params.n, launch,
             [&](const GroupFactors& factors, std::int64_t begin, std::int64_t end) {
               range(params, factors.sgd, begin, end);
             });
}

}  // namespace tessera::kernels::cpu
