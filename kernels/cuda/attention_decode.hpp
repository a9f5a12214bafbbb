#pragma once
/// Attention of single queries, and keys in pages for the paths that know none.

#include <cstddef>

#include "kernels/api/attention.hpp"

namespace tessera::kernels::cuda {

/// Whether decode_attention computes it: one query of each sample, keys in pages or not.
bool decodes(const AttentionShape& shape);
std::size_t decode_attention_workspace(const AttentionShape& shape);
/// The launcher attention_forward for such a shape. What a sample gets does not depend on the others, nor on
/// seq_k beyond the keys that it sees.
void decode_attention(const AttentionForward& params, const Launch& launch);

/// The shape of a call whose keys have been taken out of their pages.
AttentionShape gathered_shape(const AttentionShape& shape);
/// Bytes for the keys and values.
std::size_t gathered_bytes(const AttentionShape& shape);
/// Copies them into the first gathered_bytes of the workspace and returns the call that reads them there; its
/// workspace is the rest. Keys from key_end on become zeros.
AttentionForward gather_pages(const AttentionForward& params, const Launch& launch);

}  // namespace tessera::kernels::cuda
