#pragma once
/// Context parallelism: every layer works on a part of the positions, and attention alone looks at others'.

#include "tessera/autograd/functions.hpp"
#include "tessera/base/config_words.hpp"
#include "tessera/base/sequence_part.hpp"
#include "tessera/comm/communicator.hpp"

namespace tessera {

struct ContextParallel {
  Communicator* comm = nullptr;  ///< null = one rank
  ContextMethod method = ContextMethod::automatic;

  int size() const { return comm ? comm->size() : 1; }
  bool active() const { return size() > 1; }
  /// This rank's part of samples of `length` positions.
  SequencePart part(std::int64_t length) const { return {length, size(), comm ? comm->rank() : 0}; }
};

/// All positions [length, ...], in order, of the ranks' x, [part.held(), ...]; x itself with one rank.
Tensor gather_context(const ExecCtx& ctx, const ContextParallel& context, const SequencePart& part,
                      const Tensor& x);
/// The way back: this rank's positions of the sum over ranks of x [length, ...].
Tensor reduce_scatter_context(const ExecCtx& ctx, const ContextParallel& context, const SequencePart& part,
                              const Tensor& x);

/// self_attention of whole samples, of which each rank has qkv [part.held(), batch, ...] and gets the result
/// of its own positions. options.attention: key_begin, key_end and document are of whole samples.
/// options.positions are those held.
///
/// all_gather (Llama 3's training): own queries on the keys and values of all ranks, which travel once in
/// forward, and once each way in backward; none of them is kept. ulysses (DeepSpeed): qkv and the result are
/// exchanged, positions for heads and back; a rank keeps its heads' results besides. Errors: InvalidArgument
/// for ulysses where the ranks do not divide options.kv_heads.
Var context_attention(const ExecCtx& ctx, const ContextParallel& context, const SequencePart& part, Var qkv,
                      const SelfAttentionOptions& options);

}  // namespace tessera
