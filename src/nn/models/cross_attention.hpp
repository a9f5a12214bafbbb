#pragma once
#include "tessera/nn/layers.hpp"
#include "tessera/nn/stack.hpp"

namespace tessera::nn {

/// Dropout on the probabilities of a module's attention; `length`: positions of queries or keys, whichever
/// are more.
void set_attention_dropout(const Forward& forward, const ModelConfig& config, const HeadShare& heads,
                           const std::string& module, std::int64_t length, ops::AttentionOptions& options);

/// What a decoder's layer keeps of each position while text is generated.
Block::CacheShape two_stack_cache(const ModelConfig& config, const TensorParallel& tensor);

/// Attention of a decoder over what an encoder made.
class CrossAttention : public Module {
 public:
  struct Options {
    std::int64_t layer = 0;  ///< its number in the model
    double query_std = 0.02, kv_std = 0.02, proj_std = 0.02;
    bool bias = false, proj_bias = false;
    float scale = 0.0f;  ///< of scores; 0 = 1 / sqrt(head_dim)
  };
  CrossAttention(std::string name, const ModelConfig& config, const TensorParallel& tensor,
                 const Options& options);
  /// x: [seq, batch, hidden] of the decoder; memory: of the encoder, not needed where the cache has been
  /// told.
  Var forward(const Forward& forward, const Var& x, const Var& memory);

 private:
  /// Of linear_kv (all k heads, all v heads).
  std::vector<Segment> kv_rows() const;

  const ModelConfig& config_;
  HeadShare heads_;
  std::int64_t layer_;
  float scale_;
  Linear &q_, &kv_, &proj_;
};

}  // namespace tessera::nn
