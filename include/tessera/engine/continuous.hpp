#pragma once
/// Text generation whose prompts come while others are being continued (continuous batching), on any layout.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/engine/generate.hpp"

namespace tessera {

/// A prompt that came, and what is wanted of it.
struct TextRequest {
  std::uint64_t id = 0;  ///< of no other request under way
  std::vector<std::int32_t> prompt;
  /// batch_size and prefill_chunk are those of ContinuousOptions; `stop` and `on_token` cannot be used.
  GenerationOptions options;
};

/// What became of one text of a request in a round.
struct TextNews {
  std::uint64_t id = 0;
  std::int64_t sample = 0;  ///< of num_samples, or with beams of num_return, the best first
  /// What is new: tokens, and with the first of them what is told of the prompt. With beams, once: all.
  GeneratedText text;
  std::int64_t prompt_logprobs = 0;  ///< so many of text.logprobs are of the prompt
  bool done = false;
  std::string failure;  ///< why none of the request's texts goes on; empty as long as all is well
};

struct ContinuousOptions {
  std::int64_t batch_size = 32;  ///< texts computed at once by a data rank; others wait
  std::int64_t prefill_chunk = 512;
};

/// Writes texts as they are asked for. Rank 0 says what is to be done, the others follow: all ranks of the
/// engine's world call round() until it tells the end. What a text becomes depends on its request alone, not
/// on what is computed beside it. Weights must not change meanwhile.
class ContinuousGenerator {
 public:
  /// Collective over the engine's world. The engine must outlive it.
  ContinuousGenerator(Engine& engine, const ContinuousOptions& options);
  ~ContinuousGenerator();
  ContinuousGenerator(ContinuousGenerator&&) noexcept;

  /// What rank 0 wants.
  struct Orders {
    std::vector<TextRequest> requests;
    std::vector<std::uint64_t>
        cancelled;  ///< ids whose texts go no further; nothing is told of them any more
    bool end = false;
  };
  struct Round {
    std::vector<TextNews> news;  ///< on rank 0
    bool busy = false;           ///< on rank 0: there is more to be computed or told
    bool noted = false;          ///< on rank 0: another rank gave a `note` since the last round
    bool end = false;            ///< on every rank: rank 0 said so, nothing was computed
  };
  /// Collective: gives the orders of rank 0 (those of other ranks are not looked at) to all, and computes the
  /// next token of every text. Ranks that wait for rank 0 do so at most the world's timeout_s: while there is
  /// nothing to do it calls this every now and then. `note`: another rank's word for rank 0. Errors, where
  /// rank 0 has a request that cannot be: InvalidArgument there, and on other ranks CommunicationError by and
  /// by; check() comes first.
  Round round(const Orders& orders, bool note = false);

  /// Whether a request can be: safe to call from any thread. Errors: InvalidArgument as of Generator::run.
  void check(const TextRequest& request) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera
