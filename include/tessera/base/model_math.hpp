#pragma once
/// Sizes and costs of a model, from its configuration alone.

#include <cstdint>

namespace tessera {

struct ModelConfig;
struct SampleLengths;

/// Number of trainable values; a tied head counts once.
std::int64_t parameter_count(const ModelConfig& config);

/// Number of weights that multiply every token: attention and MLP matrices and the head (tied or not),
/// without the token and position tables, biases and norms; of a layer's experts those that it goes to.
std::int64_t matmul_weight_count(const ModelConfig& config);

/// How the attention matrix is counted. causal: only the half that is needed, 6 N + 6 L C S per token (N
/// matmul weights, L layers, C = heads * head_dim, S positions). palm: the full square, 6 N + 12 L C S. Of
/// layers with a window only what it shows.
enum class FlopConvention { causal, palm };

/// Floating-point operations of forward and backward per token at `seq_length`, nothing recomputed.
double flops_per_token(const ModelConfig& config, std::int64_t seq_length, FlopConvention convention);
/// The same of a token that a decoder learns, with its share of the encoder's sequence; causal attention
/// counted once.
double two_stack_flops_per_token(const ModelConfig& config, const SampleLengths& lengths);

}  // namespace tessera
