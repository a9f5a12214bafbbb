#include "launch/failure.hpp"

#include <algorithm>
#include <array>
#include <csignal>
#include <functional>
#include <sstream>
#include <string_view>
#include <tuple>

#include "launch/signals.hpp"
#include "tessera/base/error.hpp"
#include "tessera/launch/launch.hpp"

namespace tessera::launching {
namespace {

/// How well a failure explains the others.
int weight_of(const WorkerEnd& end) {
  if (!end.failed() && !end.stopped) return 0;
  if (end.stopped) return 2;
  if (end.told || end.ended_as_asked()) return 0;
  if (lost_peer(end)) return end.asked != 0 ? 0 : 1;
  return end.signal != 0 ? 4 : 3;
}

std::string said(const WorkerEnd& end, std::size_t most) {
  std::string text;
  const std::size_t skipped = end.last_lines.size() - std::min(most, end.last_lines.size());
  for (std::size_t i = skipped; i < end.last_lines.size(); ++i) {
    text += detail::concat("\n[rank ", end.rank, "] ", end.last_lines[i]);
  }
  return text;
}

constexpr std::array<std::string_view, 3> kLateWords{"did not finish within", "did not come within",
                                                     "no operation began or ended for"};

/// A program's last words, not what it may have said long before.
template <std::size_t Words>
bool said_lately(const WorkerEnd& end, const std::array<std::string_view, Words>& words) {
  constexpr std::size_t kWordsAt = 6;
  const std::size_t begin = end.last_lines.size() - std::min(kWordsAt, end.last_lines.size());
  return std::any_of(end.last_lines.begin() + static_cast<std::ptrdiff_t>(begin), end.last_lines.end(),
                     [&](const std::string& line) {
                       return std::any_of(words.begin(), words.end(), [&](std::string_view word) {
                         return line.find(word) != std::string::npos;
                       });
                     });
}

/// The job's exit code where this end explains it.
int code_of(const WorkerEnd& end) {
  if (end.stopped) return exit_code::kNoAnswer;
  if (end.signal != 0 || !lost_peer(end)) return end.code();
  return end.exit_code == exit_code::kNoAnswer || said_lately(end, kLateWords) ? exit_code::kNoAnswer
                                                                               : exit_code::kLostPeer;
}

std::string ranks_text(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) text += detail::concat(i > 0 ? ", " : "", ranks[i]);
  return text;
}

/// What the other workers did, one line for each kind of end.
std::string aftermath(std::span<const WorkerEnd> ends, std::size_t cause) {
  std::vector<std::pair<std::string, std::vector<int>>> groups;
  for (std::size_t i = 0; i < ends.size(); ++i) {
    const WorkerEnd& end = ends[i];
    if (i == cause) continue;
    std::string what = "ended without an error";
    if (end.preempted()) {
      what = "saved and ended";
    } else if (end.stopped) {
      what = "gave no answer (stopped) and was killed";
    } else if (end.told) {
      what = end.signal == SIGKILL ? "was killed by the launcher" : "was ended by the launcher";
    } else if (end.signal != 0) {
      what = "was killed by " + signal_text(end.signal);
    } else if (end.exit_code != 0) {
      what = detail::concat("exited with code ", end.exit_code);
    }
    auto group = std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return g.first == what; });
    if (group == groups.end()) group = groups.insert(groups.end(), {what, {}});
    group->second.push_back(end.rank);
  }
  std::string text;
  for (auto& [what, ranks] : groups) {
    std::string verb = what;
    if (ranks.size() > 1 && verb.starts_with("was ")) verb.replace(0, 3, "were");
    text += detail::concat("\nafterwards ", ranks_text(ranks), " ", verb);
  }
  return text;
}

}  // namespace

bool lost_peer(const WorkerEnd& end) {
  constexpr std::array<std::string_view, 8> kWords{"CommunicationError",      "lost the connection",
                                                   "connection was lost",     "ended its part in the job",
                                                   "onnection reset by peer", "onnection closed by peer",
                                                   "onnection refused",       "Broken pipe"};
  if (end.signal == SIGPIPE) return true;
  if (end.signal != 0) return false;
  if (end.exit_code == exit_code::kLostPeer || end.exit_code == exit_code::kNoAnswer) return true;
  return said_lately(end, kWords) || said_lately(end, kLateWords);
}

std::optional<std::size_t> first_cause(std::span<const WorkerEnd> ends) {
  std::optional<std::size_t> best;
  for (std::size_t i = 0; i < ends.size(); ++i) {
    if (weight_of(ends[i]) == 0) continue;
    if (!best || std::make_tuple(-weight_of(ends[i]), ends[i].at_s) <
                     std::make_tuple(-weight_of(ends[*best]), ends[*best].at_s)) {
      best = i;
    }
  }
  return best;
}

std::string describe(const WorkerEnd& end, const std::string& host) {
  const std::string who = detail::concat("rank ", end.rank, " (host ", host, ", pid ", end.pid, ") ");
  if (end.stopped) return who + "gave no answer (stopped); the launcher killed it";
  if (end.signal == SIGKILL) {
    return who + "was killed by " + signal_text(SIGKILL) +
           ": by somebody, or by the system for want of memory (see dmesg)";
  }
  if (end.signal != 0) return who + "was killed by " + signal_text(end.signal);
  return who + detail::concat("exited with code ", end.exit_code);
}

std::string report_failure(std::span<const WorkerEnd> ends, const std::string& host) {
  constexpr std::size_t kWitnessLines = 8;
  const auto cause = first_cause(ends);
  if (!cause) return {};
  const WorkerEnd& first = ends[*cause];
  std::string text = describe(first, host);
  const std::string words = said(first, first.last_lines.size());
  text += words.empty() ? "; it had written nothing" : ". Its last lines:" + words;
  // Who waited for it knows in which operation.
  const WorkerEnd* witness = nullptr;
  for (const WorkerEnd& end : ends) {
    const bool waited =
        &end != &first && end.failed() && !end.told && lost_peer(end) && !end.last_lines.empty();
    if (waited && (witness == nullptr || end.at_s < witness->at_s)) witness = &end;
  }
  if (witness != nullptr) {
    text += detail::concat("\nrank ", witness->rank,
                           ", which waited for others, said:", said(*witness, kWitnessLines));
  }
  return text + aftermath(ends, *cause);
}

std::string Outcome::encode() const {
  return detail::concat(static_cast<int>(kind), ' ', code, ' ', weight, ' ', at_ms, ' ', progress.step, ' ',
                        progress.saved, '\n', report);
}

Outcome Outcome::decode(const std::string& text) {
  std::istringstream in(text);
  int kind = -1;
  Outcome outcome;
  in >> kind >> outcome.code >> outcome.weight >> outcome.at_ms >> outcome.progress.step >>
      outcome.progress.saved;
  TESSERA_ENSURE(CommunicationError, in && kind >= 0 && kind <= static_cast<int>(Kind::preempted),
                 "a launcher sent what is no outcome: ", text.substr(0, 100));
  outcome.kind = static_cast<Kind>(kind);
  const auto line = text.find('\n');
  if (line != std::string::npos) outcome.report = text.substr(line + 1);
  return outcome;
}

Outcome outcome_of(std::span<const WorkerEnd> ends, const std::string& host, std::int64_t start_ms) {
  Outcome outcome;
  for (const WorkerEnd& end : ends) outcome.progress.join(end.progress);
  const auto cause = first_cause(ends);
  if (!cause) {
    const bool none_failed =
        std::none_of(ends.begin(), ends.end(), [](const WorkerEnd& end) { return end.failed(); });
    if (none_failed && std::any_of(ends.begin(), ends.end(), std::mem_fn(&WorkerEnd::preempted))) {
      outcome.kind = Outcome::Kind::preempted;
      outcome.code = exit_code::kPreempted;
    }
    return outcome;
  }
  const WorkerEnd& first = ends[*cause];
  outcome.kind = Outcome::Kind::failed;
  outcome.code = code_of(first);
  outcome.weight = weight_of(first);
  outcome.at_ms = start_ms + static_cast<std::int64_t>(first.at_s * 1000);
  outcome.report = report_failure(ends, host);
  return outcome;
}

Outcome combine(std::span<const Outcome> outcomes) {
  const auto rank_of = [](const Outcome& outcome) {
    // A machine that is gone explains why others lost their peers, but not a failure with a reason of its
    // own.
    const int weight = outcome.kind == Outcome::Kind::lost ? 2 : outcome.weight;
    const bool well = outcome.kind == Outcome::Kind::done || outcome.kind == Outcome::Kind::preempted;
    return std::make_tuple(outcome.kind == Outcome::Kind::interrupted ? 1 : 0, well ? 0 : 1,
                           outcome.kind == Outcome::Kind::preempted ? 1 : 0, weight, -outcome.at_ms);
  };
  Outcome result;
  Progress furthest;
  for (const Outcome& outcome : outcomes) {
    furthest.join(outcome.progress);
    if (rank_of(outcome) > rank_of(result)) result = outcome;
  }
  result.progress = furthest;
  return result;
}

}  // namespace tessera::launching
