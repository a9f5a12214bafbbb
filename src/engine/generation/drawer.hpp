#pragma once
/// From logits to the next tokens.

#include <span>
#include <vector>

#include "engine/generation/candidates.hpp"
#include "engine/generation/unit.hpp"
#include "tessera/comm/communicator.hpp"

namespace tessera::generation {

/// Of a text's next token, decayed.
double top_p_of(const Unit& unit, const GenerationOptions& options);

/// What follows from a text's next token: its log-probability is kept, and whether it ends is found. Errors:
/// what `stop` throws.
Choice take_token(Unit& unit, std::int32_t token, float logprob);

/// Draws on tensor rank 0 of the ranks with the head. Where the number of tokens that can be drawn is known
/// of all texts (greedy, top_k, beams), tensor ranks send their likeliest alone; otherwise top_p and plain
/// drawing look at whole rows, which are gathered: a threshold on them would take several rounds of messages,
/// each of which costs more than a row does.
class Drawer {
 public:
  /// `tensor`: the tensor ranks, or null for one.
  Drawer(const ExecCtx& ctx, Communicator* tensor, std::int64_t vocab_size);

  /// Collective over the tensor ranks. `logits`: this rank's columns [n, part] of the rows of `units`, one
  /// each before their first token, `width` each from then on. Empty on other ranks than the first. Errors of
  /// that one: InvalidArgument for logits that are not finite, no token left, what `stop` throws.
  std::vector<Choice> draw(const Tensor& logits, std::span<Unit* const> units, std::int64_t width);
  /// Collective likewise: adds the log-probability of each token to its units. `logits`: a row for each.
  void score(const Tensor& logits, std::span<const Scored> tokens);

 private:
  struct Row {
    const Unit* unit;
    std::size_t beam;
  };
  /// What a tensor rank tells of a row: its largest logit (nan: not sound) and the sum of exponentials by it.
  struct Mass {
    float largest = 0, sum = 0;
  };

  void read(const Tensor& logits);
  std::span<const float> row(std::size_t i) const {
    return {values_ + static_cast<std::ptrdiff_t>(i) * stride_, columns_};
  }
  /// log of the sum of exponentials of each whole row. Collective.
  void find_masses(std::size_t rows, bool sums);
  void gather_rows(std::size_t rows);
  /// The row with penalties and without what may not be drawn.
  std::span<float> adjusted(std::size_t i, const Row& row);
  void penalise(const Row& row, float penalty, double shift);
  std::vector<std::vector<Candidate>> candidates(const std::vector<Row>& rows, std::size_t k);
  /// The k likeliest of each row as the model gave it. Collective.
  std::vector<std::vector<Candidate>> likeliest(std::size_t rows, std::size_t k);
  /// The first of these, with their log-probabilities.
  std::vector<TokenLogprob> told(std::size_t i, const std::vector<Candidate>& best, std::int64_t count) const;
  std::vector<std::vector<Candidate>> exchange(std::vector<std::vector<Candidate>> own, std::size_t k);
  Choice draw_one(Unit& unit, std::size_t i, std::vector<Candidate>* from);
  Choice advance(Unit& unit, std::size_t i, std::span<std::vector<Candidate>> best);
  bool first() const { return tensor_ == nullptr || tensor_->rank() == 0; }
  bool several() const { return tensor_ != nullptr && tensor_->size() > 1; }

  ExecCtx ctx_, host_ = ExecCtx::cpu(1);
  Communicator* tensor_;
  std::int64_t vocab_size_;
  // Of the logits at hand:
  Tensor held_;
  std::vector<float> copied_;
  const float* values_ = nullptr;
  std::ptrdiff_t stride_ = 0;
  std::size_t columns_ = 0;
  std::int32_t first_token_ = 0;
  std::vector<double> lse_;  // by row, where asked for
  // Kept for the next ones:
  std::vector<float> scores_;
  std::vector<std::int32_t> changed_;
  std::vector<char> seen_;
};

}  // namespace tessera::generation
