#pragma once
/// Texts that are computed together, and what is kept of them.

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/generation/unit.hpp"

namespace tessera::generation {

/// One pass of the model over some rows of a lane.
struct Pass {
  std::int64_t row0 = 0, batch = 0, seq = 0, begin = 0;
  bool prefill = false;
  std::vector<Unit*> drawn = {};        ///< get a token from it
  std::vector<std::int32_t> last = {};  ///< rows of the residual stream that the head is asked for

  MicroBatchSize size() const { return {.batch = batch, .seq_length = seq, .generates = true}; }
};

/// Units in the order of their rows: unit u has rows [u * width, (u + 1) * width) of the cache. While a
/// unit's prompt is read it has one row, at the place that follows from the number of new units before it.
class Lane {
 public:
  Lane(const ExecCtx& ctx, Model& model, std::int64_t width, std::int64_t most_units);

  std::int64_t units() const { return static_cast<std::int64_t>(units_.size()); }
  std::int64_t free() const { return most_units_ - units(); }
  /// Units whose prompts are read next.
  void enter(std::vector<std::unique_ptr<Unit>> units);
  /// Passes that read them, `chunk` positions at a time; those with the longest prompts come first.
  std::vector<Pass> prefill(std::int64_t chunk) const;
  /// Behind the last of these: a row for each beam.
  void spread();
  /// The pass that computes each text's last token.
  Pass decode() const;
  /// Sees to room for `more` positions of every text.
  void reserve(std::int64_t more);
  /// What a pass reads, and where it stands.
  MicroBatch input(const Pass& pass) const;
  CachePass place(const Pass& pass);
  /// The pass was computed by all of this rank's pieces.
  void computed(const Pass& pass);
  /// Tokens and beams of a unit that got a choice.
  void apply(Unit& unit, const Choice& choice);
  /// Takes units that are done out of the lane.
  std::vector<std::unique_ptr<Unit>> leave();

 private:
  std::int64_t row_of(const Unit& unit) const;
  void copy_row(std::int64_t from, std::int64_t to, std::int64_t length);
  std::int64_t longest() const;

  ExecCtx ctx_;
  Model& model_;
  std::int64_t width_, most_units_;
  std::vector<std::unique_ptr<Unit>> units_;
  std::int64_t read_ = 0;  ///< units whose prompts have been read: the first ones
  KvCache cache_;
};

}  // namespace tessera::generation
