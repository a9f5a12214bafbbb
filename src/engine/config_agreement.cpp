/// What ranks of C++ programs tell each other of their configurations and learning rates. Scripts compare
/// theirs themselves, with places in them.

#include <algorithm>
#include <map>
#include <set>
#include <sstream>

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

void agree_on_rates(std::span<const UpdateRates> rates, Communicator& world) {
  if (world.size() == 1) return;
  std::ostringstream own;
  own.precision(17);
  for (std::size_t group = 0; group < rates.size(); ++group)
    own << (group > 0 ? ", " : "") << "lr " << rates[group].lr << " and weight decay "
        << rates[group].weight_decay;
  if (all_alike(meet(world, "Engine::update()", {hash_of(own.str())}))) return;
  const std::vector<std::string> texts = all_gather_bytes(world, own.str());
  std::size_t other = 1;
  while (other + 1 < texts.size() && texts[other] == texts[0]) ++other;
  throw InvalidArgument(detail::concat("Engine::update() with different rates of its groups: ", texts[0],
                                       " on rank 0; ", texts[other], " on rank ", other,
                                       ". Step schedules alike on every rank"));
}

}  // namespace tessera
