/// What ranks of C++ programs tell each other of their configurations, updates and backward passes. Scripts
/// compare theirs themselves, with places in them.

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <map>
#include <set>
#include <sstream>

#include "engine/ranks.hpp"
#include "tessera/base/config_file.hpp"
#include "tessera/base/hash.hpp"
#include "tessera/comm/bytes.hpp"
#include "tessera/comm/meeting.hpp"
#include "tessera/engine/agreement.hpp"

namespace tessera {
namespace {

std::int64_t hash_of(const std::string& text) {
  return static_cast<std::int64_t>(content_hash(std::as_bytes(std::span(text))));
}

bool all_alike(const std::vector<MeetingValues>& told) {
  return std::all_of(told.begin(), told.end(), [&](const MeetingValues& each) { return each == told[0]; });
}

/// A line "key: value" for each item that is not the business of one process or machine alone.
std::string shared_items(const Config& config) {
  static const std::set<std::string> kOwn{"device.index",       "device.threads", "device.gemm_cache",
                                          "parallel.timeout_s", "logging.dir",    "checkpoint.dir",
                                          "data.cache_dir"};
  std::string lines;
  for (const ConfigItem& item : list_items(config))
    if (!kOwn.contains(item.key)) lines += item.key + ": " + item.value + "\n";
  return lines;
}

std::map<std::string, std::string> items_of(const std::string& lines) {
  std::map<std::string, std::string> items;
  std::istringstream in(lines);
  for (std::string line; std::getline(in, line);) {
    const auto colon = line.find(": ");
    items[line.substr(0, colon)] = line.substr(std::min(line.size(), colon + 2));
  }
  return items;
}

}  // namespace

void agree_on_config(const Config& config, Communicator& world) {
  if (world.size() == 1) return;
  const std::string own = shared_items(config);
  if (all_alike(meet(world, "build_engine() or train()", {hash_of(own)}))) return;
  const std::vector<std::string> texts = all_gather_bytes(world, own);
  const auto first = items_of(texts[0]);
  std::string differences;
  for (std::size_t rank = 1; rank < texts.size(); ++rank) {
    for (const auto& [key, value] : items_of(texts[rank])) {
      const std::string& expected = first.at(key);
      if (value != expected)
        differences +=
            detail::concat("\n  ", key, " is ", expected, " on rank 0 and ", value, " on rank ", rank);
    }
  }
  throw ConfigError("ranks were given different configurations:" + differences +
                    "\nGive every rank the same file and the same overrides");
}

void agree_on_update(std::span<const UpdateRates> rates, std::span<const double> factors,
                     Communicator& world) {
  if (world.size() == 1) return;
  std::ostringstream own;
  own.precision(17);
  for (std::size_t group = 0; group < rates.size(); ++group)
    own << (group > 0 ? ", " : "") << "lr " << rates[group].lr << " and weight decay "
        << rates[group].weight_decay;
  own << "; calls added with factors";
  for (const double factor : factors) own << ' ' << factor;
  if (all_alike(meet(world, "Engine::update()", {hash_of(own.str())}))) return;
  const std::vector<std::string> texts = all_gather_bytes(world, own.str());
  std::size_t other = 1;
  while (other + 1 < texts.size() && texts[other] == texts[0]) ++other;
  throw InvalidArgument(detail::concat(
      "Engine::update() with different rates of its groups or after different calls: ", texts[0],
      " on rank 0; ", texts[other], " on rank ", other,
      ". Step schedules, and add calls, alike on every rank"));
}

namespace {

/// A number that another gradient of the same shape does not have, and how much rounding may move it.
struct Mark {
  double sum = 0, scale = 0;
};

/// Sums with pseudo-random weights, because the rows of a softmax's gradient sum to zero.
Mark mark_of(const Tensor& gradient) {
  constexpr std::int64_t kLanes = 4;  // sums of their own, so that additions need not wait for each other
  std::array<double, kLanes> sums{}, scales{};
  const float* values = gradient.data<float>();
  const std::int64_t count = gradient.numel();
  for (std::int64_t i = 0; i < count; ++i) {
    const auto bits = static_cast<std::uint32_t>(i) * 2654435761u;
    const double weight = static_cast<double>(static_cast<std::int32_t>(bits)) * 0x1p-31;
    const auto lane = static_cast<std::size_t>(i % kLanes);
    sums[lane] += static_cast<double>(values[i]) * weight;
    scales[lane] += std::abs(static_cast<double>(values[i]));
  }
  return {(sums[0] + sums[1]) + (sums[2] + sums[3]), (scales[0] + scales[1]) + (scales[2] + scales[3])};
}

bool differ(const Mark& a, const Mark& b) {
  if (std::isnan(a.scale) || std::isnan(b.scale)) return std::isnan(a.scale) != std::isnan(b.scale);
  return std::abs(a.sum - b.sum) > 1e-5 * std::max(a.scale, b.scale);
}

}  // namespace

void agree_on_backward(const ProcessMesh& mesh, std::int64_t forward, const Tensor& upstream,
                       const std::exception_ptr& failure) {
  Communicator& world = mesh.world();
  if (world.size() == 1) {
    if (failure) std::rethrow_exception(failure);
    return;
  }
  const bool marked = !failure && mesh.shape().tp * mesh.shape().cp > 1 && upstream &&
                      upstream.device().is_cpu() && upstream.is_contiguous();
  const Mark own = marked ? mark_of(upstream) : Mark{};
  const auto told = meet(world, "Engine::backward()",
                         {forward, failure ? 1 : 0, marked ? 1 : 0, std::bit_cast<std::int64_t>(own.sum),
                          std::bit_cast<std::int64_t>(own.scale)});
  if (std::any_of(told.begin(), told.end(), [](const auto& each) { return each[1] != 0; }))
    on_every_rank(ExecCtx::cpu(1), world, [&] {
      if (failure) std::rethrow_exception(failure);
    });
  for (std::size_t r = 1; r < told.size(); ++r)
    TESSERA_CHECK(told[r][0] == told[0][0], "rank ", r, " runs backward() of forward number ", told[r][0],
                  " and rank 0 of number ", told[0][0],
                  ": every rank must run the same ones in the same order");
  std::map<int, std::size_t> first;  // by data rank
  for (std::size_t r = 0; r < told.size(); ++r) {
    if (told[r][2] == 0) continue;
    const int data_rank = coordinates_of(mesh.shape(), static_cast<int>(r)).dp;
    const std::size_t other = first.emplace(data_rank, r).first->second;
    const auto mark = [&](std::size_t rank) {
      return Mark{std::bit_cast<double>(told[rank][3]), std::bit_cast<double>(told[rank][4])};
    };
    TESSERA_ENSURE(DataError, !differ(mark(other), mark(r)), "ranks ", other, " and ", r,
                   " gave backward() different gradients, and both are tensor or context ranks of data rank ",
                   data_rank,
                   ", which computes one loss together: their loss needs the same labels and weights");
  }
}

}  // namespace tessera
