#pragma once
#include <string>

#include "tessera/base/config.hpp"
#include "tessera/nn/stack.hpp"

namespace tessera::nn {

/// What models of an encoder and a decoder, as T5 is, have in common: the first model.encoder_layers layers
/// are the encoder's, the others the decoder's, which writes texts while the encoder rests.
class TwoStacks : public Stack {
 public:
  TwoStacks(const ModelConfig& config, const Numerics& numerics, const Sharding& given);

  std::int64_t vocab_size() const override { return config_.vocab_size; }
  bool reads_encoder_tokens() const override { return true; }
  std::int64_t max_positions() const override { return config_.max_positions; }
  bool is_repeatable() const override { return true; }
  double flops_per_token(const SampleLengths& lengths) const override;
  void check_generates(std::int64_t length) const override { check_length(length); }

 protected:
  /// Errors: ConfigError, beginning with `family`, for what neither of them has, and for layers or a
  /// vocabulary that cannot be shared out.
  void check_stacks(const std::string& family) const;
  std::int64_t encoder_layers() const { return *config_.encoder_layers; }
  std::string layer_name(std::int64_t layer) const;
  /// Of the sequence that the encoder reads.
  static MicroBatchSize encoded(const MicroBatchSize& size) {
    return {size.batch, size.encoder_seq_length, 0, size.generates};
  }
  /// Whether the encoder rests in a pass: what it made is in the cache.
  static bool remembers(const MicroBatchSize& size) { return size.generates && size.encoder_seq_length == 0; }

  const ModelConfig config_;
};

}  // namespace tessera::nn
