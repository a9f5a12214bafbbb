#pragma once
/// What is served: two ways to ask for texts.

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cli/serve/desk.hpp"
#include "cli/serve/fields.hpp"
#include "cli/serve/http.hpp"
#include "cli/text_ends.hpp"

namespace tessera::cli::serving {

inline constexpr std::int64_t kMostPrompts = 128;             ///< of a request
inline constexpr std::int64_t kMost = std::int64_t{1} << 30;  ///< of numbers that the model bounds
/// How often it is looked whether a client is still there.
inline constexpr std::chrono::milliseconds kLook{100};

/// A tokenizer for several threads.
class Texts {
 public:
  Texts(std::shared_ptr<Tokenizer> tokenizer, const TextEnds& ends)
      : tokenizer_(std::move(tokenizer)), ends_(ends) {}

  const TextEnds& ends() const { return ends_; }
  /// Ids of prompt number `index`. Errors: BadRequest.
  std::vector<std::int32_t> encode(const std::string& text, const std::string& param);
  std::string decode(const std::vector<std::int32_t>& ids);
  /// The text of each token alone.
  std::vector<std::string> pieces(const std::vector<std::int32_t>& ids);

 private:
  std::mutex mutex_;
  std::shared_ptr<Tokenizer> tokenizer_;
  TextEnds ends_;
};

struct Service {
  Desk& desk;
  Texts& texts;
  std::string model;  ///< its name
  std::int64_t max_prompt = 0;
  std::function<std::uint64_t()> random_seed;  ///< for requests that name none

  /// Takes requests. Errors: BadRequest, `param` naming the prompts.
  std::unique_ptr<Ticket> submit(std::vector<TextRequest> requests, const std::string& param) const;
};

/// OpenAI's POST /v1/completions.
HttpReply complete(const Service& service, const HttpCall& call);
/// Megatron-LM's PUT /api.
HttpReply megatron_api(const Service& service, const HttpCall& call);
/// Either, or what is said of the server itself. Errors: BadRequest.
HttpReply respond(const Service& service, const HttpCall& call);

}  // namespace tessera::cli::serving
