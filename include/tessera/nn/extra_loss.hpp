#pragma once
/// Losses that a model has besides that of its tokens: a second head's, or what balances experts.

#include <string>
#include <vector>

#include "tessera/autograd/tape.hpp"

namespace tessera {

/// What the values of an extra loss are divided by: how many of these the whole batch of a call has, over all
/// micro-batches and data ranks.
enum class LossCount {
  targets,         ///< labels that count
  positions,       ///< of all samples, whatever is in them
  samples,         ///< of the batch
  sample_targets,  ///< Batch::sample_labels that count
};

/// An extra loss as its model declares it (Model::extra_losses): the same on every rank, whatever pieces it
/// holds.
struct ExtraLossSpec {
  std::string name;     ///< "balance": metrics call it balance_loss
  double weight = 1.0;  ///< in the loss that is trained
  LossCount per = LossCount::samples;
};

/// Values of an extra loss, as a piece computes them for one micro-batch.
struct ExtraLoss {
  std::string name;
  Var values;  ///< fp32 [n]: they are added up, with all others of this name
  /// Under sequence parallelism each tensor rank may have the values of its own positions; otherwise all of
  /// them have the same ones, which count once.
  bool own_positions = false;
};
using ExtraLosses = std::vector<ExtraLoss>;

}  // namespace tessera
