#pragma once
/// Texts that are computed together, and what is kept of them.

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/generation/pages.hpp"
#include "engine/generation/unit.hpp"

namespace tessera::generation {

/// One pass of the model over some rows of a lane.
struct Pass {
  std::int64_t row0 = 0, batch = 0, seq = 0, begin = 0;
  std::int64_t encoder_seq = 0;  ///< positions that an encoder reads; 0 = it rests
  std::int64_t capacity = 0;     ///< of the cache
  bool prefill = false;
  std::vector<const Unit*> read = {};  ///< whose prompts are read, by row of a prefill
  std::vector<Scored> scored = {};     ///< tokens of prompts that are told from it
  std::vector<Unit*> drawn = {};       ///< get a token from it
  /// Rows of the residual stream that logits are wanted of: for each of `scored`, then of `drawn`.
  std::vector<std::int32_t> last = {};
  /// The same rows once each, rising: what the head is asked for.
  std::vector<std::int32_t> asked() const;

  MicroBatchSize size() const {
    return {.batch = batch,
            .seq_length = seq,
            .encoder_seq_length = encoder_seq,
            .generates = true,
            .capacity = capacity};
  }
};

/// Units in the order of their rows: unit u has rows [u * width, (u + 1) * width) of the cache. While prompts
/// are read each has one row, behind those of the units that are there already; samples of one prompt share
/// it, and then its pages.
class Lane {
 public:
  Lane(const ExecCtx& ctx, Model& model, std::int64_t width, std::int64_t most_units);

  std::int64_t units() const { return static_cast<std::int64_t>(units_.size()); }
  std::int64_t free() const { return most_units_ - units(); }
  /// That the cache has, of all texts that there may be.
  std::int64_t rows() const { return most_units_ * width_; }
  KvCache& cache() { return cache_; }
  /// Another one whenever memory of the cache is another.
  std::uint64_t cache_number() const { return cache_number_; }
  /// Units whose prompts are read next.
  void enter(std::vector<std::unique_ptr<Unit>> units);
  /// Passes that read them, `chunk` positions at a time; those with the longest prompts come first.
  std::vector<Pass> prefill(std::int64_t chunk) const;
  /// Behind the last of these: rows for each sample and beam.
  void spread();
  /// The pass that computes each text's last token.
  Pass decode() const;
  /// Positions that the longest text has, or that its prompt will have.
  std::int64_t longest() const;
  /// Sees to room for `more` positions of every text.
  void reserve(std::int64_t more);
  /// What a pass reads, and where it stands.
  MicroBatch input(const Pass& pass) const;
  CachePass place(const Pass& pass);
  /// The pass was computed by all of this rank's pieces.
  void computed(const Pass& pass);
  /// Tokens and beams of a unit that got a choice.
  void apply(Unit& unit, const Choice& choice);
  void each(const std::function<void(Unit&)>& look) const {
    for (const auto& unit : units_) look(*unit);
  }
  /// Takes units that are done out of the lane.
  std::vector<std::unique_ptr<Unit>> leave();

 private:
  std::int64_t row_of(const Unit& unit) const;
  /// The tokens of a pass over prompts whose probabilities it tells, and their rows.
  void add_scored(Pass& pass) const;
  std::vector<Unit*> samples_of(const Unit& prompt) const;
  /// New units by prompt: the first sample of each, in the order of their rows.
  std::vector<const Unit*> fresh_prompts() const;
  Pass prompt_pass(std::span<const Unit* const> prompts, std::int64_t first, std::int64_t begin,
                   std::int64_t seq) const;
  std::vector<Pass> encoder_passes(std::span<const Unit* const> prompts, std::int64_t chunk) const;
  std::shared_ptr<const MicroBatch> encoder_input(const Pass& pass) const;
  /// Where the encoder's results of these units lie, `rows_each` rows of each.
  void place_encoded(const Pass& pass, std::span<const Unit* const> units, std::int64_t rows_each,
                     CachePass& place) const;
  /// What an encoder made of a row's prompt.
  void copy_encoded(std::int64_t from, std::int64_t to);
  /// Pages of its own for the next `more` positions of every text that is written.
  void own_next(std::int64_t more);
  /// Room in the table for `positions` of each row, and `encoded` positions of what an encoder made.
  void reserve_tables(std::int64_t positions, std::int64_t encoded);
  void grow_pools(std::int64_t pages);
  /// The device's pages become what the rows have.
  void settle_pages();

  ExecCtx ctx_;
  Model& model_;
  std::int64_t width_, most_units_;
  std::vector<std::unique_ptr<Unit>> units_;
  std::int64_t read_ = 0;  ///< units whose prompts have been read: the first ones
  KvCache cache_;
  Pages pages_;            ///< by row of the cache
  std::int64_t pool_ = 0;  ///< pages that the cache has memory for
  std::uint64_t cache_number_ = 0;
};

}  // namespace tessera::generation
