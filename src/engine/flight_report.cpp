/// What the dumps of all ranks say together.

#include <algorithm>
#include <cstdio>
#include <map>
#include <optional>
#include <set>
#include <string_view>

#include "engine/flight_dump.hpp"
#include "tessera/base/error.hpp"
#include "tessera/comm/meeting.hpp"
#include "tessera/engine/watchdog.hpp"

namespace tessera {
namespace {

using Operation = FlightDump::Operation;

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", seconds);
  return text;
}

std::vector<int> list_of(const std::set<int>& ranks) { return {ranks.begin(), ranks.end()}; }

std::string shape_text(const Operation& operation) {
  std::string text;
  for (const std::int64_t n : operation.shape) text += detail::concat(text.empty() ? "" : ", ", n);
  return operation.dtype + (operation.dtype.empty() ? "[" : " [") + text + "]";
}

/// All dumps of a job, by rank.
class Flights {
 public:
  explicit Flights(const std::filesystem::path& folder) {
    std::error_code none;
    for (const auto& entry : std::filesystem::directory_iterator(folder, none)) {
      const std::string name = entry.path().filename().string();
      if (!name.starts_with("rank-") || entry.path().extension() != ".json") continue;
      FlightDump dump = read_flight(entry.path());
      const int rank = dump.rank;
      TESSERA_ENSURE(DataError, dumps_.emplace(rank, std::move(dump)).second, entry.path().string(),
                     ": another file is of rank ", rank, " as well");
    }
    TESSERA_ENSURE(
        DataError, !dumps_.empty(), folder.string(),
        ": there is no dump (rank-N.json). A run writes them when it hangs, loses another rank, or "
        "its processes get SIGUSR2");
    for (const auto& [rank, dump] : dumps_) {
      TESSERA_ENSURE(DataError, dump.world_size == dumps_.begin()->second.world_size, folder.string(),
                     ": these dumps are of jobs of ", dump.world_size, " and of ",
                     dumps_.begin()->second.world_size, " ranks: remove those of the older one");
    }
    for (auto& [rank, dump] : dumps_) note_calls(dump);
  }

  const std::map<int, FlightDump>& dumps() const { return dumps_; }
  int world_size() const { return dumps_.begin()->second.world_size; }
  std::vector<int> without_dump() const {
    std::vector<int> ranks;
    for (int rank = 0; rank < world_size(); ++rank) {
      if (!dumps_.contains(rank)) ranks.push_back(rank);
    }
    return ranks;
  }

  /// A rank's call of a collective, if it is still in its dump.
  const Operation* call_of(int rank, const FlightDump::Group& group, std::uint64_t sequence) const {
    const auto found = calls_.find({group, sequence});
    if (found == calls_.end()) return nullptr;
    const auto by_rank = found->second.find(rank);
    return by_rank == found->second.end() ? nullptr : by_rank->second;
  }
  /// How many collectives of the group a rank has called at least.
  std::uint64_t called(int rank, const FlightDump::Group& group) const {
    const auto found = most_.find({group, rank});
    return found == most_.end() ? 0 : found->second;
  }

  struct Key {
    FlightDump::Group group;
    std::uint64_t sequence = 0;
    auto operator<=>(const Key&) const = default;
  };
  const std::map<Key, std::map<int, const Operation*>>& calls() const { return calls_; }

 private:
  void note_calls(const FlightDump& dump) {
    for (const Operation& operation : dump.operations) {
      if (!operation.collective()) continue;
      const FlightDump::Group& group = dump.groups[operation.group];
      calls_[{group, operation.sequence}][dump.rank] = &operation;
      std::uint64_t& most = most_[{group, dump.rank}];
      most = std::max(most, operation.sequence + 1);
    }
  }

  std::map<int, FlightDump> dumps_;
  std::map<Key, std::map<int, const Operation*>> calls_;
  std::map<std::pair<FlightDump::Group, int>, std::uint64_t> most_;
};

/// What a rank was in when it was written down.
struct Situation {
  const Operation* waits_in = nullptr;  ///< a communication that is not over
  const Operation* runs = nullptr;      ///< the kernel or pass that is not over
  const Operation* last = nullptr;      ///< what ended last
  std::set<int> waits_for;
};

std::set<int> missing_in(const Flights& flights, const FlightDump& dump, const Operation& operation) {
  std::set<int> missing;
  const FlightDump::Group& group = dump.groups[operation.group];
  const auto absent = [&](int rank) {
    return !flights.dumps().contains(rank) || flights.called(rank, group) <= operation.sequence;
  };
  if (operation.peer >= 0) {
    const auto peer = static_cast<std::size_t>(operation.peer);
    missing.insert(peer < group.ranks.size() ? group.ranks[peer] : operation.peer);
    return missing;
  }
  for (const int rank : group.ranks) {
    if (rank != dump.rank && absent(rank)) missing.insert(rank);
  }
  return missing;
}

Situation situation_of(const Flights& flights, const FlightDump& dump) {
  Situation situation;
  for (const Operation& operation : dump.operations) {
    if (operation.done()) {
      if (situation.last == nullptr || operation.end >= situation.last->end) situation.last = &operation;
    } else if (operation.communicates) {
      const bool better = situation.waits_in == nullptr || (operation.waited && !situation.waits_in->waited);
      if (better) situation.waits_in = &operation;
    } else if (operation.state == "running") {
      situation.runs = &operation;  // the innermost
    }
  }
  if (situation.waits_in != nullptr) situation.waits_for = missing_in(flights, dump, *situation.waits_in);
  return situation;
}

std::string describe(const FlightDump& dump, const Operation& operation) {
  if (!operation.communicates) return operation.name + " " + shape_text(operation);
  const FlightDump::Group& group = dump.groups[operation.group];
  std::string text = detail::concat(operation.name, " ", operation.sequence, " on group ", group.name);
  if (!group.ranks.empty()) text += " (" + ranks_text(group.ranks) + ")";
  return text + ", " + shape_text(operation);
}

std::string line_of(const FlightDump& dump, const Situation& situation) {
  std::string text = detail::concat("rank ", dump.rank, ": ");
  text += dump.call.empty() ? "in no call"
                            : "in " + dump.call + " for " + seconds_text(dump.taken - dump.call_begin);
  const auto since = [&](const Operation& operation) {
    return ", for " + seconds_text(dump.taken - operation.queued);
  };
  if (situation.runs != nullptr) text += "; runs " + describe(dump, *situation.runs) + since(*situation.runs);
  if (situation.waits_in != nullptr) {
    text += (situation.waits_in->waited ? "; waits for " : "; under way is ") +
            describe(dump, *situation.waits_in) + since(*situation.waits_in);
    if (!situation.waits_for.empty()) {
      text += ", which " + ranks_text(list_of(situation.waits_for)) +
              (situation.waits_in->peer >= 0 ? " did not answer" : " did not call");
    }
  }
  if (situation.runs == nullptr && situation.waits_in == nullptr && situation.last != nullptr) {
    text += "; the last to end was " + describe(dump, *situation.last) + ", " +
            seconds_text(dump.taken - situation.last->end) + " before";
  }
  return text;
}

/// Those that others wait for and that wait for nobody themselves.
std::set<int> behind(const Flights& flights, const std::map<int, Situation>& situations) {
  std::set<int> awaited;
  for (const auto& [rank, situation] : situations)
    awaited.insert(situation.waits_for.begin(), situation.waits_for.end());
  std::set<int> ranks;
  for (const int rank : awaited) {
    const auto found = situations.find(rank);
    if (found == situations.end() || found->second.waits_for.empty()) ranks.insert(rank);
  }
  if (!ranks.empty() || !awaited.empty()) return ranks;
  // Nobody waits for anybody: who hangs in a kernel, or has written nothing.
  for (const int rank : flights.without_dump()) ranks.insert(rank);
  for (const auto& [rank, situation] : situations) {
    if (situation.runs != nullptr && !flights.dumps().at(rank).call.empty()) ranks.insert(rank);
  }
  return ranks;
}

bool alike(const Operation& a, const Operation& b) {
  const bool one_size = a.name == "all_reduce" || a.name == "broadcast";
  return a.name == b.name && a.dtype == b.dtype && (!one_size || a.shape == b.shape);
}

/// The earliest collective that two ranks called differently.
std::string first_difference(const Flights& flights) {
  std::string text;
  double earliest = 0;
  for (const auto& [key, by_rank] : flights.calls()) {
    const auto& [first_rank, first] = *by_rank.begin();
    for (const auto& [rank, operation] : by_rank) {
      if (alike(*first, *operation) || (!text.empty() && first->queued >= earliest)) continue;
      earliest = first->queued;
      text = detail::concat("first difference: ", describe(flights.dumps().at(first_rank), *first),
                            " on rank ", first_rank, " is ", describe(flights.dumps().at(rank), *operation),
                            " on rank ", rank);
    }
  }
  return text;
}

std::string conclusion(const Flights& flights, const std::map<int, Situation>& situations, bool differs) {
  const std::set<int> ranks = behind(flights, situations);
  if (ranks.empty() && differs) return "nobody is behind: they called different things";
  if (ranks.empty()) return "nobody is behind: no rank waits for one that does not come";
  std::string text = "behind: " + ranks_text(list_of(ranks));
  for (const int rank : ranks) {
    if (!flights.dumps().contains(rank)) {
      text += detail::concat("\n  rank ", rank,
                             " left no dump: it was stopped or killed, or its machine is gone");
      continue;
    }
    const Situation& situation = situations.at(rank);
    const FlightDump& dump = flights.dumps().at(rank);
    text += "\n  " + line_of(dump, situation);
  }
  return text;
}

}  // namespace

std::string compare_flights(const std::filesystem::path& folder) {
  TESSERA_ENSURE(DataError, std::filesystem::is_directory(folder), folder.string(),
                 ": there is no such folder. Check the path.");
  const std::filesystem::path inside = folder / "flight";
  const Flights flights(std::filesystem::is_directory(inside) ? inside : folder);
  std::map<int, Situation> situations;
  for (const auto& [rank, dump] : flights.dumps()) situations[rank] = situation_of(flights, dump);
  std::string text =
      detail::concat("dumps of ", flights.dumps().size(), " of ", flights.world_size(), " ranks\n");
  std::set<std::string> reasons;
  for (const auto& [rank, dump] : flights.dumps()) {
    if (reasons.insert(dump.why).second) text += detail::concat("rank ", rank, " wrote: ", dump.why, "\n");
  }
  for (const auto& [rank, dump] : flights.dumps()) text += line_of(dump, situations.at(rank)) + "\n";
  for (const int rank : flights.without_dump()) text += detail::concat("rank ", rank, ": no dump\n");
  const std::string difference = first_difference(flights);
  if (!difference.empty()) text += difference + "\n";
  return text + conclusion(flights, situations, !difference.empty()) + "\n";
}

}  // namespace tessera
