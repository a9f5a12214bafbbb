#pragma once
/// WeightWalk: brings weights that data ranks hold as shares together for the passes that read them, and
/// frees them behind these.

#include <vector>

#include "tessera/base/config_words.hpp"
#include "tessera/optim/weights.hpp"

namespace tessera {

/// Buckets that are read together, as a layer's are, in one pass.
struct WeightVisit {
  std::vector<std::size_t> buckets = {};
  /// 1: of a forward pass whose backward pass reads them again, until when ZeroReshard::never keeps them; -1:
  /// of that backward pass.
  int opens = 0;
  /// Whose gradients are complete when this pass has done with it.
  std::vector<std::size_t> completes = {};
};

/// The passes of a call, known beforehand: what they read in which order. Reading a parameter comes to the
/// visit that has its bucket; so does the end of a pass with all that were left out. Whatever a rank
/// computes, even nothing, it gathers the same in the same order as the others, and the next visit's weights
/// are on their way during this one's work. Nothing here waits for the device.
class WeightWalk {
 public:
  /// All three are kept by reference. No-op everywhere unless shards.shares_model(): then every parameter
  /// reads through this.
  WeightWalk(const FlatLayout& layout, const Shards& shards, Weights& weights);
  ~WeightWalk();
  WeightWalk(const WeightWalk&) = delete;
  WeightWalk& operator=(const WeightWalk&) = delete;

  /// Passes to come, each with its visits; what a walk before left undone is made up for, so that all ranks
  /// stay in step. Errors: InternalError inside of Hold.
  void begin(const std::vector<std::vector<WeightVisit>>& passes, ZeroReshard reshard);
  /// The pass's next visit, as if one of its buckets was read; null where none is left.
  const WeightVisit* advance();
  /// The pass is over: visits nobody read are made up for.
  void end_pass();
  /// No pass is left; everything is free again.
  void end();
  /// Makes up for passes that never came.
  void abandon();

  /// All weights, whole until this goes: to generate, or to read what no pass does. Collective over the data
  /// ranks, between calls. Does nothing where ranks hold whole weights.
  class Hold {
   public:
    explicit Hold(WeightWalk& walk);
    ~Hold();
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

   private:
    WeightWalk& walk_;
  };

 private:
  struct Visit : WeightVisit {
    std::vector<std::size_t> freed = {};  ///< by whoever comes to the next one
    std::vector<std::size_t> later = {};  ///< of these, what is read again, but not soon
  };

  bool active() const { return shards_.shares_model(); }
  void find_freed(ZeroReshard reshard);
  void come_to(std::size_t bucket);
  void enter(std::size_t visit);
  void free(std::size_t bucket);

  const FlatLayout& layout_;
  const Shards& shards_;
  Weights& weights_;
  std::vector<Visit> visits_;
  std::vector<std::size_t> ends_;  // of passes: one past their last visit
  std::size_t pass_ = 0;           // the pass we are in
  std::size_t next_ = 0;           // the visit that comes next
  bool walking_ = false;
  int holds_ = 0;
};

}  // namespace tessera
