/// training.recompute auto on real devices: what memory there is, and one choice for all ranks.

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <sstream>

#include "engine/plan_memory.hpp"
#include "engine/ranks.hpp"
#include "tessera/comm/bytes.hpp"
#include "tessera/engine/build.hpp"

namespace tessera {
namespace {

/// What stays free of a device's memory because no plan counts it. In proportion: real peaks are within a
/// fiftieth of the plan (plan_counters_test), and the allocator cannot use every byte of its segments.
/// Fixed, on a GPU: the context with the code of all kernels, workspaces of cuBLASLt and cuDNN, NCCL's
/// buffers; on a machine: the system, other programs, the code of ours. A quarter is enough of a small one.
constexpr std::int64_t kReservedPart = 16, kReservedBytes = 2'000'000'000, kMostReserved = 4;

/// One rank's share of a device's memory.
MemoryLimit share_of(std::int64_t total, std::int64_t ranks, bool gpu) {
  const std::int64_t reserve = std::min(total / kReservedPart + kReservedBytes, total / kMostReserved);
  const std::int64_t gigabytes = (total + 500'000'000) / 1'000'000'000;
  std::string source = gpu          ? "a GPU's "
                       : ranks == 1 ? "this machine's "
                                    : detail::concat("1 / ", ranks, " of a machine's ");
  return {(total - reserve) / ranks, source + detail::concat(gigabytes, " GB less a reserve")};
}

std::optional<MemoryLimit> given_limit(const DeviceConfig& device) {
  if (!device.memory_gb) return std::nullopt;
  return MemoryLimit{std::llround(*device.memory_gb * 1e9), "device.memory_gb"};
}

/// The memory a rank runs in, as all ranks must know it: "BYTES gpu" or "BYTES cpu MACHINE".
std::string describe_memory(const Device& device) {
  if (!device.is_cpu()) return detail::concat(memory_bytes_of(device), " gpu");
  std::array<char, 256> machine{};
  ::gethostname(machine.data(), machine.size() - 1);
  return detail::concat(memory_bytes_of(device), " cpu ", machine.data());
}

/// The smallest share of all ranks. A GPU belongs to one rank, a machine's memory to all that run on its CPU.
MemoryLimit smallest_limit(const ExecCtx& host, const DeviceConfig& config, Communicator& world) {
  if (const auto given = given_limit(config)) return *given;
  std::string own;
  on_every_rank(host, world, [&] { own = describe_memory(device_of(config)); });
  const std::vector<std::string> all = all_gather_bytes(world, own);
  std::map<std::string, std::int64_t> ranks_of;
  for (const std::string& each : all) ++ranks_of[each];
  std::optional<MemoryLimit> least;
  for (const auto& [each, ranks] : ranks_of) {
    std::istringstream text(each);
    std::int64_t total = 0;
    std::string kind;
    text >> total >> kind;
    const bool gpu = kind == "gpu";
    MemoryLimit share = share_of(total, gpu ? 1 : ranks, gpu);
    if (!least || share.bytes < least->bytes) least = std::move(share);
  }
  return *least;
}

/// Errors: ConfigError if nothing fits.
RecomputeChoice choose(const Config& config, std::int64_t processes, MemoryLimit limit) {
  Plan layout = detail::plan_layout(config, processes);
  RecomputeChoice choice = detail::choose_recompute(layout, std::move(limit));
  layout.config.training = detail::with_recompute(layout.config.training, choice.chosen.options);
  TESSERA_ENSURE(ConfigError, choice.fits(), "training.recompute ", to_text(choice), ". ",
                 advice_text(layout, choice.limit.bytes));
  return choice;
}

/// Options between ranks.
std::string to_message(const RecomputeOptions& o) {
  return detail::concat(static_cast<int>(o.what), " ", static_cast<int>(o.method), " ", o.layers);
}
RecomputeOptions from_message(const std::string& message) {
  std::istringstream text(message);
  int what = 0, method = 0;
  RecomputeOptions options;
  text >> what >> method >> options.layers;
  options.what = static_cast<Recompute>(what);
  options.method = static_cast<RecomputeMethod>(method);
  return options;
}

}  // namespace

MemoryLimit memory_limit(const DeviceConfig& config, std::int64_t ranks) {
  if (const auto given = given_limit(config)) return *given;
  const int gpus = cuda_devices().count;
  TESSERA_ENSURE(ConfigError, config.type != DeviceChoice::cuda || gpus > 0,
                 "training.recompute auto cannot ask a GPU for its memory, as there is none here; give "
                 "device.memory_gb");
  const Device device = device_of(config);
  if (device.is_cpu()) return share_of(memory_bytes_of(device), ranks, false);
  std::int64_t least = memory_bytes_of(device);
  for (int index = 0; index < std::min<std::int64_t>(gpus, ranks) && !config.index; ++index)
    least = std::min(least, memory_bytes_of({DeviceType::cuda, index}));
  return share_of(least, 1, true);
}

Config settle_recompute(Config config, std::int64_t processes) {
  if (config.training.recompute != Recompute::automatic) return config;
  const RecomputeChoice choice = choose(config, processes, memory_limit(config.device, processes));
  config.training = detail::with_recompute(config.training, choice.chosen.options);
  return config;
}

Config settle_recompute(Config config, const std::shared_ptr<Communicator>& given, const Logger& log) {
  if (config.training.recompute != Recompute::automatic) return config;
  const ExecCtx host = ExecCtx::cpu(1);
  const std::shared_ptr<Communicator> world = given ? given : make_self_communicator();
  const MemoryLimit limit = smallest_limit(host, config.device, *world);
  const std::string chosen = on_first_rank(host, *world, [&] {
    const RecomputeChoice choice = choose(config, world->size(), limit);
    log.info("training.recompute ", to_text(choice));
    return to_message(choice.chosen.options);
  });
  config.training = detail::with_recompute(config.training, from_message(chosen));
  return config;
}

}  // namespace tessera
