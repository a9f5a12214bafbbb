/// The check of a schedule. It states the rules again from scratch and shares nothing with the generators.

#include <deque>
#include <map>
#include <set>
#include <tuple>

#include "pipeline/label.hpp"
#include "tessera/base/error.hpp"
#include "tessera/pipeline/schedule.hpp"

namespace tessera {

namespace {

/// What a table must bring about once for each piece and micro-batch.
enum class Effect { output, input_gradient, weight_gradient };
using Pass = std::tuple<int, int, Effect>;  // piece, micro-batch

struct Place {
  int stage = 0, position = 0;
  friend bool operator==(const Place&, const Place&) = default;
  friend auto operator<=>(const Place&, const Place&) = default;
};

class Verifier {
 public:
  explicit Verifier(const Schedule& schedule) : schedule_(schedule) {}

  std::vector<std::string> run() {
    if (!check_size()) return faults_;
    collect();
    check_completeness();
    check_order();
    check_deadlock();
    if (faults_.empty()) check_messages();
    return faults_;
  }

 private:
  template <typename... Parts>
  void fault(const Parts&... parts) {
    faults_.push_back(detail::concat(parts...));
  }

  int piece_count() const { return schedule_.stages * schedule_.chunks; }

  /// Where a piece belongs: down the stages again and again, or where it is folded down and up again.
  std::pair<int, int> home(int piece) const {
    int stage = piece, chunk = 0;
    for (; stage >= schedule_.stages; stage -= schedule_.stages) ++chunk;
    if (traits_of(schedule_.kind).folded && chunk == 1) stage = 2 * schedule_.stages - 1 - piece;
    return {stage, chunk};
  }

  bool check_size() {
    if (schedule_.stages < 1 || schedule_.chunks < 1 || schedule_.micro_batches < 1) {
      fault("impossible size: ", schedule_.stages, " stages, ", schedule_.chunks, " chunks, ",
            schedule_.micro_batches, " micro-batches");
    } else if (schedule_.actions.size() != static_cast<std::size_t>(schedule_.stages)) {
      fault(schedule_.actions.size(), " columns for ", schedule_.stages, " stages");
    } else if (const std::string fault_of_chunks = chunk_fault(schedule_.kind, schedule_.chunks);
               !fault_of_chunks.empty()) {
      fault(fault_of_chunks);
    }
    return faults_.empty();
  }

  static std::vector<Effect> effects_of(Action::Kind kind) {
    switch (kind) {
      case Action::Kind::forward:
        return {Effect::output};
      case Action::Kind::backward:
        return {Effect::input_gradient, Effect::weight_gradient};
      case Action::Kind::input_gradient:
        return {Effect::input_gradient};
      default:
        return {Effect::weight_gradient};
    }
  }
  static const char* name(Effect effect) {
    return effect == Effect::output ? "F" : effect == Effect::input_gradient ? "B" : "W";
  }
  std::string name(const Place& place) const {
    const auto& column = schedule_.actions[static_cast<std::size_t>(place.stage)];
    return detail::concat("stage ", place.stage, " at ",
                          label_of(column[static_cast<std::size_t>(place.position)], schedule_.chunks),
                          " (pass ", place.position + 1, ")");
  }

  void collect() {
    std::map<std::pair<int, int>, int> pieces;
    for (int piece = 0; piece < piece_count(); ++piece) {
      const auto at = home(piece);
      pieces[at] = piece;
      if (schedule_.stage_of(piece) != at.first || schedule_.chunk_of(piece) != at.second ||
          schedule_.piece_of(at.first, at.second) != piece) {
        fault("piece ", piece, " belongs to stage ", at.first, " as chunk ", at.second);
      }
    }
    for (int stage = 0; stage < schedule_.stages; ++stage) {
      const auto& column = schedule_.actions[static_cast<std::size_t>(stage)];
      for (int position = 0; position < static_cast<int>(column.size()); ++position) {
        const Action& action = column[static_cast<std::size_t>(position)];
        const Place place{stage, position};
        const auto piece = pieces.find({stage, action.chunk});
        if (piece == pieces.end() || action.micro_batch < 0 ||
            action.micro_batch >= schedule_.micro_batches) {
          fault(name(place), ": no such chunk or micro-batch");
          continue;
        }
        for (const Effect effect : effects_of(action.kind)) {
          const auto [first, is_new] =
              places_.try_emplace({piece->second, action.micro_batch, effect}, place);
          if (!is_new) {
            fault(name(place), ": ", name(effect), " was done before, by ", name(first->second));
          } else if (schedule_.forward_only && effect != Effect::output) {
            fault(name(place), ": a backward pass in a forward-only schedule");
          }
        }
      }
    }
  }

  void check_completeness() {
    for (int piece = 0; piece < piece_count(); ++piece) {
      for (int micro_batch = 0; micro_batch < schedule_.micro_batches; ++micro_batch) {
        for (const Effect effect : {Effect::output, Effect::input_gradient, Effect::weight_gradient}) {
          const bool wanted = effect == Effect::output || !schedule_.forward_only;
          if (wanted && !places_.contains({piece, micro_batch, effect})) {
            fault("nobody does ", name(effect), " of piece ", piece, ", micro-batch ", micro_batch);
          }
        }
      }
    }
  }

  const Place* find(int piece, int micro_batch, Effect effect) const {
    const auto found = places_.find({piece, micro_batch, effect});
    return found == places_.end() ? nullptr : &found->second;
  }

  /// On a stage: F, then B, then W (which may be one pass with B).
  void check_order() {
    for (const auto& [pass, place] : places_) {
      const auto& [piece, micro_batch, effect] = pass;
      if (effect == Effect::output) continue;
      const bool weights = effect == Effect::weight_gradient;
      const Place* before = find(piece, micro_batch, weights ? Effect::input_gradient : Effect::output);
      if (before == nullptr || *before < place || (weights && *before == place)) continue;
      fault(name(place), ": its ", weights ? "B" : "F", " comes only later, ", name(*before));
    }
  }

  /// The pass on another piece that makes what a pass needs; null if there is none.
  const Place* source(const Pass& pass) const {
    const auto& [piece, micro_batch, effect] = pass;
    if (effect == Effect::output) return find(piece - 1, micro_batch, Effect::output);
    if (effect == Effect::input_gradient) return find(piece + 1, micro_batch, Effect::input_gradient);
    return nullptr;
  }

  /// Strikes out passes whose predecessor on the stage and whose source are struck out already, until no more
  /// can be. What is left can never run.
  void check_deadlock() {
    std::map<Place, int> waiting_for;
    std::multimap<Place, Place> followers;
    std::deque<Place> runnable;
    for (int stage = 0; stage < schedule_.stages; ++stage) {
      const int length = static_cast<int>(schedule_.actions[static_cast<std::size_t>(stage)].size());
      for (int position = 0; position < length; ++position) {
        waiting_for[{stage, position}] = position > 0 ? 1 : 0;
        if (position > 0) followers.insert({{stage, position - 1}, {stage, position}});
      }
    }
    for (const auto& [pass, place] : places_) {
      const Place* from = source(pass);
      if (from == nullptr) continue;
      followers.insert({*from, place});
      ++waiting_for[place];
    }
    for (const auto& [place, count] : waiting_for) {
      if (count == 0) runnable.push_back(place);
    }
    std::set<Place> struck;
    while (!runnable.empty()) {
      const Place place = runnable.front();
      runnable.pop_front();
      struck.insert(place);
      const auto [begin, end] = followers.equal_range(place);
      for (auto follower = begin; follower != end; ++follower) {
        if (--waiting_for[follower->second] == 0) runnable.push_back(follower->second);
      }
    }
    int reported = -1;
    for (const auto& [place, count] : waiting_for) {
      if (struck.contains(place) || place.stage == reported) continue;
      reported = place.stage;
      fault("deadlock: ", name(place), " waits for ever");
    }
  }

  /// From one stage to another, activations are sent in the order in which they are used, and so are
  /// gradients.
  void check_messages() {
    using Channel = std::tuple<int, int, Effect>;  // from, to
    std::map<Channel, std::map<Place, Place>> channels;
    for (const auto& [pass, place] : places_) {
      const Place* from = source(pass);
      if (from == nullptr || from->stage == place.stage) continue;
      channels[{from->stage, place.stage, std::get<Effect>(pass)}][*from] = place;
    }
    for (const auto& [channel, messages] : channels) {
      const Place* previous = nullptr;
      for (const auto& [sent, used] : messages) {
        if (previous != nullptr && used < *previous) {
          fault("messages cross: ", name(sent), " sends after, but ", name(used), " needs it before ",
                name(*previous));
          break;
        }
        previous = &used;
      }
    }
  }

  const Schedule& schedule_;
  std::map<Pass, Place> places_;
  std::vector<std::string> faults_;
};

}  // namespace

std::vector<std::string> verify(const Schedule& schedule) { return Verifier(schedule).run(); }

}  // namespace tessera
