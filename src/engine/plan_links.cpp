#include <algorithm>

#include "tessera/engine/plan.hpp"

namespace tessera {
namespace {

using Group = std::vector<int>;

std::string text_of(const Group& group) {
  std::string text = "[";
  for (const int rank : group) text += detail::concat(text.size() > 1 ? " " : "", rank);
  return text + "]";
}

std::string text_of(const std::vector<Group>& groups) {
  std::string text;
  for (const Group& group : groups) text += detail::concat(text.empty() ? "" : " ", text_of(group));
  return text;
}

/// The first two GPUs of a group that are in two islands.
struct Gap {
  int a = 0, b = 0;
};
std::optional<Gap> gap_in(const Group& gpus, const std::vector<int>& island_of) {
  for (const int gpu : gpus) {
    if (island_of[static_cast<std::size_t>(gpu)] != island_of[static_cast<std::size_t>(gpus[0])])
      return Gap{gpus[0], gpu};
  }
  return std::nullopt;
}

std::string groups_text(std::size_t some, std::size_t all) {
  return some == all ? detail::concat("all ", all, " tensor groups")
                     : detail::concat(some, " of ", all, " tensor groups");
}

}  // namespace

std::vector<std::string> link_warnings(const Plan& plan, const Topology& topology) {
  const auto tensor = std::find_if(plan.groups.begin(), plan.groups.end(),
                                   [](const RankGroups& axis) { return axis.axis == "tp"; });
  const auto gpus = static_cast<int>(topology.gpus.size());
  if (tensor == plan.groups.end() || gpus == 0) return {};
  const std::vector<Group> islands = nvlink_islands(topology);
  std::vector<int> island_of(topology.gpus.size());
  std::size_t largest = 0;
  for (std::size_t i = 0; i < islands.size(); ++i) {
    largest = std::max(largest, islands[i].size());
    for (const int gpu : islands[i]) island_of[static_cast<std::size_t>(gpu)] = static_cast<int>(i);
  }
  std::vector<Group> leave_machine, leave_island;
  Gap gap;
  for (const Group& group : tensor->groups) {
    if (group.front() / gpus != group.back() / gpus) {
      leave_machine.push_back(group);
      continue;
    }
    Group local;
    for (const int rank : group) local.push_back(rank % gpus);
    if (const auto found = gap_in(local, island_of)) {
      if (leave_island.empty()) gap = *found;
      leave_island.push_back(group);
    }
  }
  std::vector<std::string> warnings;
  const std::size_t all = tensor->groups.size();
  if (!leave_machine.empty()) {
    warnings.push_back(detail::concat(groups_text(leave_machine.size(), all), " leave their machine of ",
                                      gpus, gpus == 1 ? " GPU" : " GPUs", ", such as ranks ",
                                      text_of(leave_machine.front()),
                                      ": tensor ranks talk in every layer and would wait for the network. "
                                      "Take a parallel.tensor that divides ",
                                      gpus, ", and pipeline stages or data ranks between machines"));
  }
  if (!leave_island.empty()) {
    warnings.push_back(detail::concat(
        groups_text(leave_island.size(), all), " leave their NVLink island, such as ranks ",
        text_of(leave_island.front()), ": GPU", gap.a, " and GPU", gap.b, " are connected by ",
        to_text(topology.between(static_cast<std::size_t>(gap.a), static_cast<std::size_t>(gap.b))),
        largest > 1
            ? detail::concat("; the islands are ", text_of(islands), ". Take a parallel.tensor of at most ",
                             largest,
                             " that stays within them, and pipeline stages or data ranks between them")
            : std::string(", and there is no NVLink at all. Pipeline stages and data ranks send less than "
                          "tensor ranks")));
  }
  return warnings;
}

}  // namespace tessera
