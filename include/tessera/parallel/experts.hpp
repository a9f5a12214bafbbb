#pragma once
/// Mixtures of experts: a router sends each token to a few of a layer's MLPs (Shazeer et al., "Outrageously
/// large neural networks"). No token is dropped, whatever the others choose.

#include <vector>

#include "tessera/autograd/functions.hpp"
#include "tessera/comm/communicator.hpp"

namespace tessera {

struct RouterOptions {
  std::int64_t topk = 1;
  bool normalized = true;  ///< the weights of a token add up to 1
  bool balance = false;    ///< Routed::balance is wanted
  bool z = false;          ///< Routed::z is wanted
  /// Those that hold the other positions of the same samples, whose choices the balance counts as well.
  std::vector<Communicator*> positions = {};
  Tensor counted = {};  ///< int32 [tokens]: 0 = padding; undefined = none is
};

/// Which experts tokens go to.
struct Routed {
  Var weight;     ///< fp32 [tokens, topk]
  Tensor expert;  ///< int32 [tokens, topk], the greatest logit first
  /// fp32 [batch]: how unevenly each sample's tokens choose, 1 = evenly; of the positions that this rank has,
  /// whose values add up to the sample's.
  Var balance;
  Var z;  ///< fp32 [tokens]: the square of the log-sum-exp of a token's logits, 0 for padding
};
/// logits [seq, batch, experts].
Routed route(const ExecCtx& ctx, const Var& logits, const RouterOptions& options);

/// How ranks share out the experts of a layer: each holds as many neighbours, in the ranks' order.
struct ExpertParallel {
  Communicator* comm = nullptr;  ///< null = one rank

  int size() const { return comm ? comm->size() : 1; }
  int rank() const { return comm ? comm->rank() : 0; }
  bool active() const { return size() > 1; }
};

/// Experts that a rank holds, in order: fc1 [width (twice for a gate), hidden], fc2 [hidden, width].
struct ExpertWeights {
  std::vector<Parameter*> fc1, fc2;
};

/// y[t] = the sum over j of weight[t, j] fc2(activation(fc1(x[t]))) of the expert expert[t, j]. x [...,
/// hidden] of this rank's tokens; weight, expert as in Routed. How many tokens each expert gets is read by
/// the host. Of hidden values those before the activation are kept; weight gradients are the second phase.
///
/// With several ranks, `experts` are those of this one; rows of tokens travel to their experts and back, in
/// forward and in backward, and those that came are kept. All ranks make the same calls in the same order,
/// also one without tokens. Errors: CommunicationError.
Var expert_mlp(const ExecCtx& ctx, const Var& x, const Var& weight, const Tensor& expert,
               const ExpertWeights& experts, ops::ActivationKind kind, const ExpertParallel& parallel = {});

}  // namespace tessera
