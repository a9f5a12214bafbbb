#pragma once
/// The optimizer's state of one rank of Megatron: which tensors are the main weight and Adam's moments of
/// which parameter.

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/megatron_groups.hpp"

namespace tessera::checkpoint_detail {

/// A parameter of a rank, in the order in which its model registered them.
struct RankParameter {
  std::string name;  ///< as the rank's file has it
  TorchTensor weight;
  std::size_t chunk = 0;
  bool shared = false;  ///< an embedding that another stage has too
};

/// Where the values of a parameter lie, each as large as its weight.
struct ParameterState {
  TorchTensor main, exp_avg, exp_avg_sq;
};

struct RankOptimizer {
  const TorchFile* file = nullptr;         ///< that holds the tensors
  std::vector<ParameterState> parameters;  ///< as those given
  OptimizerFacts said;
};

/// What a rank's optimizer is read from.
struct RankState {
  const TorchFile& file;  ///< model_optim_rng.pt
  const std::vector<RankParameter>& parameters;
  std::size_t chunks = 1;
  std::int64_t stage = 0, data = 1;  ///< data: ranks that share one model
  SymbolicLinks links = SymbolicLinks::within_folder;
};

/// The state of `rank`; a file that it opens for this is added to `files`. Errors: CheckpointError that names
/// what is not there or not read: no state, another optimizer than Adam, several optimizers in a chain,
/// groups with rates of their own, a distributed optimizer of before 2024, tensors of other sizes than the
/// weights.
RankOptimizer read_rank_optimizer(const RankState& rank, std::vector<std::unique_ptr<TorchFile>>& files);

}  // namespace tessera::checkpoint_detail
