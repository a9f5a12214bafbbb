#pragma once
/// ShardFlow: what must follow the passes of a column where data ranks hold shares of gradients and weights.

#include <functional>
#include <memory>
#include <vector>

#include "tessera/base/config_words.hpp"
#include "tessera/nn/model.hpp"
#include "tessera/optim/param_store.hpp"
#include "tessera/pipeline/schedule.hpp"

namespace tessera {

struct EngineLayout;

/// Tells the store which passes come, and when each is over: weights are gathered before they are read and
/// freed behind that, gradients are reduced behind each pass that adds to them. All data ranks walk the same
/// column, so they gather and reduce in one order, whatever samples they have.
class ShardFlow {
 public:
  /// Null where the store holds whole gradients.
  static std::unique_ptr<ShardFlow> make(Model& model, ParamStore& params, const EngineLayout& layout);

  void begin(const std::vector<Action>& column);
  /// The pass that begins contributes to the gradients of this chunk.
  void begin_gradients(int chunk);
  void end_pass();
  /// A pass in which this rank computes nothing.
  void skip_pass();
  void end();
  /// Whether weights are kept from a forward pass to its backward pass.
  bool keeps_weights() const { return reshard_ == ZeroReshard::never && params_.shards().shares_model(); }
  /// Makes up for what a call that threw has left, so that all ranks stay in step.
  void abandon();

 private:
  /// What a pass reads, in buckets.
  struct Pass {
    std::vector<WeightVisit> visits;
    std::vector<std::size_t> unread = {};  ///< whose gradients it makes without a visit
  };
  struct Piece {
    Pass forward, backward, weight_gradient;
    std::vector<std::size_t> gradients = {};  ///< as backward finishes them
  };

  ShardFlow(Model& model, ParamStore& params, ZeroReshard reshard);
  const Pass& pass_of(const Action& action) const;
  void run_left_out();

  ParamStore& params_;
  ZeroReshard reshard_;
  std::vector<Piece> pieces_;
  std::vector<Action> column_;
  std::size_t done_ = 0;  // of the column
  bool in_gradients_ = false;
};

/// A number for each parameter of a model, by what its buckets are cut (ParamStoreOptions::unit): from stage
/// 3 on units, in stage 2 pieces. Null below.
std::function<int(const Parameter&)> unit_numbers(Model& model, const EngineLayout& layout);

}  // namespace tessera
