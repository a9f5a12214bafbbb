#include "tessera/engine/score.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "tessera/base/hash.hpp"
#include "tessera/comm/bytes.hpp"
#include "tessera/comm/heartbeat.hpp"
#include "tessera/comm/meeting.hpp"
#include "tessera/engine/engine.hpp"

namespace tessera {
namespace {

/// Positions of a micro-batch, and logits that a rank keeps of a round: 256 MB.
constexpr std::int64_t kPositions = 4096, kLogits = std::int64_t{1} << 26;

void check_texts(const Model& model, const std::vector<TextToScore>& texts) {
  model.check_generates(0);  // what looks to both sides has no probability of the next token
  TESSERA_CHECK(!model.reads_encoder_tokens(),
                "texts are scored by models of one stack: this one also reads an encoder's sequence");
  for (std::size_t i = 0; i < texts.size(); ++i) {
    const auto& [tokens, first] = texts[i];
    const auto length = static_cast<std::int64_t>(tokens.size());
    TESSERA_CHECK(first >= 1 && first < length, "text ", i, " of ", length,
                  " tokens is to be scored from token ", first,
                  ": at least one token stands before the first that is scored");
    TESSERA_CHECK(length - 1 <= model.max_positions(), "text ", i, " of ", length,
                  " tokens is too long for the model's ", model.max_positions(), " positions");
    for (const std::int32_t token : tokens) {
      TESSERA_CHECK(token >= 0 && token < model.vocab_size(), "token ", token, " of text ", i,
                    " is outside the vocabulary of ", model.vocab_size());
    }
  }
}

std::int64_t hash_of(const std::vector<TextToScore>& texts, bool likeliest) {
  std::uint64_t hash = likeliest ? 1 : 0;
  for (const TextToScore& text : texts) {
    hash = content_hash(std::as_bytes(std::span(&text.first, 1)), hash);
    hash = content_hash(std::as_bytes(std::span(text.tokens)), hash);
  }
  return static_cast<std::int64_t>(hash);
}

/// Ranks must have come with the same texts, and with none that cannot be. Collective.
void agree_on_texts(Communicator& world, const Model& model, const std::vector<TextToScore>& texts,
                    bool likeliest) {
  std::exception_ptr failure;
  try {
    check_texts(model, texts);
  } catch (const Error&) {
    if (world.size() == 1) throw;
    failure = std::current_exception();
  }
  const auto told = meet(world, "score_texts()", {hash_of(texts, likeliest), failure ? 1 : 0});
  std::vector<int> others;
  for (std::size_t r = 0; r < told.size(); ++r) {
    if (told[r][0] != told[0][0]) others.push_back(static_cast<int>(r));
  }
  TESSERA_CHECK(others.empty(), "score_texts() got other texts on ", ranks_text(others),
                " than on rank 0: every rank gives the same ones");
  if (failure) std::rethrow_exception(failure);
}

/// The engine's number of micro-batches comes back with the end of the call.
class MicroBatches {
 public:
  MicroBatches(Engine& engine, std::int64_t count)
      : engine_(engine), before_(engine.options().micro_batches) {
    engine_.set_micro_batches(count);
  }
  ~MicroBatches() { engine_.set_micro_batches(before_); }
  MicroBatches(const MicroBatches&) = delete;
  MicroBatches& operator=(const MicroBatches&) = delete;

 private:
  Engine& engine_;
  std::int64_t before_;
};

/// log of the probability of `token` by a row of logits, and whether it is the likeliest.
std::pair<float, bool> read_row(const float* logits, std::int64_t vocab, std::int32_t token) {
  const float* end = logits + vocab;
  const float* largest = std::max_element(logits, end);
  double sum = 0;
  for (const float* logit = logits; logit != end; ++logit)
    sum += std::exp(static_cast<double>(*logit) - static_cast<double>(*largest));
  const double logprob = static_cast<double>(logits[token]) - static_cast<double>(*largest) - std::log(sum);
  return {static_cast<float>(logprob), largest - logits == token};
}

class Scoring {
 public:
  Scoring(Engine& engine, const std::vector<TextToScore>& texts, const ScoreOptions& options)
      : engine_(engine), texts_(texts), options_(options), order_(texts.size()) {
    std::iota(order_.begin(), order_.end(), std::size_t{0});
    // Texts of about the same length are computed together, the longest first.
    std::ranges::stable_sort(order_,
                             [&](std::size_t a, std::size_t b) { return positions(a) > positions(b); });
  }

  std::vector<TextScores> run() {
    const MeshShape& mesh = engine_.mesh().shape();
    const MicroBatches keep(engine_, mesh.pp);
    for (std::size_t begin = 0; begin < order_.size();) {
      const std::size_t count = std::min(order_.size() - begin, round_size(begin));
      round(begin, count);
      begin += count;
      heartbeat(engine_.mesh().world());
      if (options_.on_progress) options_.on_progress(static_cast<std::int64_t>(begin));
    }
    return share();
  }

 private:
  std::int64_t positions(std::size_t text) const {
    return static_cast<std::int64_t>(texts_[text].tokens.size()) - 1;
  }
  std::int64_t scored(std::size_t text) const {
    return static_cast<std::int64_t>(texts_[text].tokens.size()) - texts_[text].first;
  }

  /// Texts computed at once by all data ranks, of which text `begin` is the longest.
  std::size_t round_size(std::size_t begin) const {
    const MeshShape& mesh = engine_.mesh().shape();
    const std::int64_t length = positions(order_[begin]);
    std::int64_t samples = std::max<std::int64_t>(1, kPositions / length) * mesh.pp;
    if (options_.likeliest)
      samples =
          std::min(samples, std::max<std::int64_t>(1, kLogits / (length * engine_.model().vocab_size())));
    return static_cast<std::size_t>(samples * mesh.dp);
  }

  /// Padding stands behind a text, where none of its positions looks.
  Batch batch_of(std::size_t begin, const Part& own) const {
    const std::int64_t tp = engine_.mesh().shape().tp;  // sequence parallelism shares positions out evenly
    Batch batch{.batch = own.count, .seq_length = (positions(order_[begin]) + tp - 1) / tp * tp};
    batch.global_batch = Batch::kUnknown;
    const auto elements = static_cast<std::size_t>(batch.batch * batch.seq_length);
    batch.tokens.assign(elements, 0);
    if (!options_.likeliest) batch.labels.assign(elements, kIgnoredLabel);
    for (std::int64_t i = 0; i < own.count; ++i) {
      const TextToScore& text = texts_[order_[begin + static_cast<std::size_t>(own.begin + i)]];
      const std::int64_t row = i * batch.seq_length;
      std::copy(text.tokens.begin(), text.tokens.end() - 1, batch.tokens.begin() + row);
      if (!options_.likeliest)
        std::copy(text.tokens.begin() + text.first, text.tokens.end(),
                  batch.labels.begin() + row + text.first - 1);
    }
    return batch;
  }

  void round(std::size_t begin, std::size_t count) {
    const Part own =
        part_of(static_cast<std::int64_t>(count), engine_.mesh().coordinates().dp, engine_.mesh().shape().dp);
    const Batch batch = batch_of(begin, own);
    const Engine::Output kind = options_.likeliest ? Engine::Output::logits : Engine::Output::token_losses;
    const Tensor output = engine_.forward(batch, kind, false).output;
    engine_.ctx().stream->synchronize();
    if (!output || engine_.mesh().coordinates().tp != 0) return;
    for (std::int64_t i = 0; i < own.count; ++i) {
      const std::size_t text = order_[begin + static_cast<std::size_t>(own.begin + i)];
      read(output.narrow(0, i, 1).narrow(1, texts_[text].first - 1, scored(text)).to_floats(), text);
    }
  }

  /// Logits or losses of a text's scored tokens, into bytes for the other ranks.
  void read(const std::vector<float>& values, std::size_t text) {
    const auto count = static_cast<std::size_t>(scored(text));
    const std::int64_t vocab = engine_.model().vocab_size();
    bool all = options_.likeliest;
    for (std::size_t t = 0; t < count; ++t) {
      float logprob = 0;
      if (options_.likeliest) {
        const std::int32_t token = texts_[text].tokens[static_cast<std::size_t>(texts_[text].first) + t];
        const auto [value, likeliest] =
            read_row(values.data() + static_cast<std::ptrdiff_t>(t) * vocab, vocab, token);
        logprob = value;
        all = all && likeliest;
      } else {
        logprob = -values[t];
      }
      put(logprob);
    }
    put(all ? 1.0f : 0.0f);
  }
  void put(float value) { told_.append(reinterpret_cast<const char*>(&value), sizeof(value)); }

  /// Every rank knows which texts a data rank has computed, so scores alone travel.
  std::vector<TextScores> share() {
    const MeshShape& mesh = engine_.mesh().shape();
    Communicator& world = engine_.mesh().world();
    const std::vector<std::string> told =
        world.size() == 1 ? std::vector<std::string>{told_} : all_gather_bytes(world, told_);
    std::vector<TextScores> scores(texts_.size());
    for (std::size_t rank = 0; rank < told.size(); ++rank) {
      if (!told[rank].empty()) unpack(told[rank], coordinates_of(mesh, static_cast<int>(rank)).dp, scores);
    }
    for (std::size_t i = 0; i < scores.size(); ++i) {
      TESSERA_ENSURE(TrainingError,
                     std::ranges::none_of(scores[i].logprobs, [](float value) { return std::isnan(value); }),
                     "the model's probabilities of text ", i,
                     " are not numbers: its weights are damaged, or values overflow in its precision");
    }
    return scores;
  }

  void unpack(const std::string& bytes, int data_rank, std::vector<TextScores>& scores) const {
    const char* from = bytes.data();
    std::size_t left = bytes.size();
    const auto take = [&](void* to, std::size_t size) {
      TESSERA_ENSURE(CommunicationError, size <= left, "scores were cut on their way");
      std::memcpy(to, from, size);
      from += size;
      left -= size;
    };
    const int data_ranks = engine_.mesh().shape().dp;
    for (std::size_t begin = 0; begin < order_.size();) {
      const std::size_t count = std::min(order_.size() - begin, round_size(begin));
      const Part part = part_of(static_cast<std::int64_t>(count), data_rank, data_ranks);
      for (std::int64_t i = part.begin; i < part.begin + part.count; ++i) {
        const std::size_t text = order_[begin + static_cast<std::size_t>(i)];
        scores[text].logprobs.resize(static_cast<std::size_t>(scored(text)));
        take(scores[text].logprobs.data(), scores[text].logprobs.size() * sizeof(float));
        float likeliest = 0;
        take(&likeliest, sizeof(likeliest));
        scores[text].likeliest = likeliest != 0;
      }
      begin += count;
    }
  }

  Engine& engine_;
  const std::vector<TextToScore>& texts_;
  const ScoreOptions& options_;
  std::vector<std::size_t> order_;
  std::string told_;
};

}  // namespace

std::vector<TextScores> score_texts(Engine& engine, const std::vector<TextToScore>& texts,
                                    const ScoreOptions& options) {
  agree_on_texts(engine.mesh().world(), engine.model(), texts, options.likeliest);
  return Scoring(engine, texts, options).run();
}

}  // namespace tessera
