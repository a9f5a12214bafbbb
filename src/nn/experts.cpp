#include "nn/mlp_linears.hpp"
#include "tessera/nn/layers.hpp"

namespace tessera::nn {
namespace {

/// What every tensor rank computes with, of what each has a part or a copy of.
Var on_all_ranks(const ExecCtx& ctx, const TensorParallel& tensor, const Var& x) {
  return tensor.sharded_sequence() ? gather_sequence(ctx, tensor, x) : copy_to_tensor_ranks(ctx, tensor, x);
}
/// The sum of what tensor ranks computed, as the layer's surroundings hold it.
Var sum_of_ranks(const ExecCtx& ctx, const TensorParallel& tensor, const Var& x) {
  return tensor.sharded_sequence() ? reduce_scatter_sequence(ctx, tensor, x)
                                   : reduce_from_tensor_ranks(ctx, tensor, x);
}

}  // namespace

MixtureOfExperts::MixtureOfExperts(std::string name, const ModelConfig& config, const TensorParallel& tensor,
                                   const ExpertParallel& parallel)
    : FeedForward(std::move(name)),
      options_{.topk = config.router_topk,
               .normalized = config.router_normalized.value_or(true),
               .balance = config.router_aux_loss > 0.0,
               .z = config.router_z_loss > 0.0},
      share_(1.0f / static_cast<float>(layers_with_experts(config))),
      activation_(activation_kind(config.activation)),
      tensor_(tensor),
      parallel_(parallel),
      router_(submodule<Linear>("router", Linear::Options{.in = config.hidden_size,
                                                          .out = *config.num_experts,
                                                          .bias = false,
                                                          .std = config.init_std,
                                                          .sequence_parallel = tensor.sharded_sequence()})) {
  TESSERA_ENSURE(ConfigError, *config.num_experts % parallel.size() == 0, "model.num_experts (",
                 *config.num_experts, ") does not divide by parallel.expert (", parallel.size(), ")");
  const std::int64_t width = expert_width(config);
  Linear::Options fc1 = fc1_options(config, tensor, width), fc2 = fc2_options(config, tensor, width);
  fc1.expert = fc2.expert = parallel.active();
  const Part own = part_of(*config.num_experts, parallel.rank(), parallel.size());
  for (std::int64_t i = own.begin; i < own.end(); ++i) {
    const std::string expert = "experts.local_experts." + std::to_string(i);
    experts_.fc1.push_back(&submodule<Linear>(expert + ".linear_fc1", fc1).weight());
    experts_.fc2.push_back(&submodule<Linear>(expert + ".linear_fc2", fc2).weight());
  }
}

/// Each tensor rank chooses for the positions that it has; those that have the same choose the same.
Routed MixtureOfExperts::choose(const Forward& forward, const TensorParallel& tensor, const Var& x) {
  const ExecCtx& ctx = forward.exec;
  const bool shared = tensor.sharded_sequence();
  RouterOptions options = options_;
  if (forward.losses == nullptr) options.balance = options.z = false;
  if (shared) options.positions.push_back(tensor.comm);
  if (forward.context.active()) options.positions.push_back(forward.context.comm);
  if (forward.input.counted) {
    const std::int64_t rows = x.value().numel() / x.value().size(-1);
    options.counted = forward.input.counted.narrow(0, shared ? tensor.rank() * rows : 0, rows);
  }
  Routed routed = route(ctx, router_.forward(forward, x), options);
  if (options.balance) forward.add_loss(kBalance, scale(ctx, routed.balance, share_), shared);
  if (options.z) forward.add_loss(kZ, scale(ctx, routed.z, share_), shared);
  return routed;
}

Var MixtureOfExperts::forward(const Forward& forward, const Var& x) {
  const ExecCtx& ctx = forward.exec;
  const TensorParallel tensor = forward.shared(tensor_);
  const Routed routed = choose(forward, tensor, x);
  const Tensor expert = on_all_ranks(ctx, tensor, Var(routed.expert)).value();
  return sum_of_ranks(ctx, tensor,
                      expert_mlp(ctx, on_all_ranks(ctx, tensor, x), on_all_ranks(ctx, tensor, routed.weight),
                                 expert, experts_, activation_, parallel_));
}

}  // namespace tessera::nn
