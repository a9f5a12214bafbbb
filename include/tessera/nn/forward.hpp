#pragma once
/// What a model's forward gets: the tokens of one micro-batch, where to compute, where to record.

#include <memory>
#include <string_view>
#include <vector>

#include "tessera/base/philox.hpp"
#include "tessera/nn/extra_loss.hpp"
#include "tessera/parallel/context.hpp"
#include "tessera/parallel/functions.hpp"

namespace tessera {

/// Sizes of a micro-batch.
struct MicroBatchSize {
  std::int64_t batch = 0, seq_length = 0;
  std::int64_t encoder_seq_length = 0;  ///< of the sequence an encoder reads beside the decoder's; 0 = none
  bool generates = false;               ///< a CachePass: tensor ranks share no positions
  std::int64_t capacity = 0;            ///< of its cache, in positions
};

/// One micro-batch on the device. Rows are position-major: row r holds position r / batch of sample r %
/// batch, of those positions that this rank holds.
struct MicroBatch {
  std::int64_t batch = 0, seq_length = 0;  ///< positions held
  SequencePart part = {};                  ///< of whole samples, where context ranks share them
  Tensor tokens;                           ///< [seq_length, batch] int32
  Tensor labels;              ///< [seq_length * batch] int32, -100 = ignored; undefined without targets
  LabelledRows labelled;      ///< of `labels`, where few enough count that the others are left out
  Tensor positions;           ///< [seq_length * batch] int32
  Tensor key_begin, key_end;  ///< [batch] int32: each sample's real tokens; undefined = all
  Tensor document;            ///< [batch, whole_length()] int32 document numbers; undefined = one document
  Tensor token_types;         ///< [seq_length, batch] int32; undefined = all of type 0
  /// [seq_length * batch] int32: 0 = padding; undefined = there is none, or the model has no extra losses.
  Tensor counted;
  Tensor sample_labels;      ///< [batch] int32, -100 = ignored; undefined without any
  std::int64_t sample0 = 0;  ///< global number of sample 0
  /// The same samples as the encoder of an encoder-decoder reads them: tokens and their real ranges. Null
  /// where a model has one sequence.
  std::shared_ptr<const MicroBatch> encoder = nullptr;

  std::int64_t whole_length() const { return part.ranks > 1 ? part.length : seq_length; }
  MicroBatchSize size() const { return {batch, seq_length, encoder ? encoder->seq_length : 0}; }
  /// Calls `act` with each tensor, undefined ones too, in one order; not with `labelled`, and the encoder's
  /// are its own.
  template <typename Act>
  void each_tensor(Act&& act) {
    each_tensor_of(*this, act);
  }
  template <typename Act>
  void each_tensor(Act&& act) const {
    each_tensor_of(*this, act);
  }

 private:
  template <typename Self, typename Act>
  static void each_tensor_of(Self& m, Act& act) {
    for (auto* tensor : {&m.tokens, &m.labels, &m.positions, &m.key_begin, &m.key_end, &m.document,
                         &m.token_types, &m.counted, &m.sample_labels})
      act(*tensor);
  }
};

/// Keys and values of earlier positions: generation computes each position once. Every row is a text of its
/// own, which begins at position 0 and has pages for as many positions as it needs.
struct KvCache {
  /// By layer of the model, pools of pages [n, kv_heads, kCachePage, head_dim]; undefined for layers of other
  /// ranks, and those without any.
  std::vector<Tensor> key = {}, value = {};
  /// [rows, entries] int32, one table for all layers: entry i of a row is its page of the positions
  /// [kCachePage i, kCachePage (i + 1)). Rows may share pages. What stands in entries that a row has no
  /// positions for is read by nobody.
  Tensor pages = {};
  /// What a decoder's layers read of an encoder's result, [rows, kv_heads, encoder_capacity, head_dim].
  std::vector<Tensor> cross_key = {}, cross_value = {};
  std::int64_t rows = 0, capacity = 0, encoder_capacity = 0;  ///< capacity: positions that a row may have
};

/// A pass of generation: its samples are rows [row0, row0 + batch) of the cache. Either all of them have
/// `begin` positions there and the input holds those behind, or (`lengths` not empty) the input is one
/// position of each, the last of so many.
struct CachePass {
  KvCache* cache = nullptr;
  std::int64_t row0 = 0;
  std::int64_t begin = 0;
  std::vector<std::int64_t> lengths = {};
  std::int64_t longest = 0;  ///< of the lengths
  /// [batch] int32: the lengths; where the samples have `begin` positions, where each of them ends, and
  /// nothing is kept of the input behind that. Undefined there: all of it is kept.
  Tensor key_end = {};
  Tensor last = {};  ///< [n] int32: rows of the residual stream that the head is asked for
  /// Of models with an encoder: how long the sequences are that it read, [batch] int32, and the longest. It
  /// runs in the passes whose input has some, which fill the cache; others read that.
  Tensor encoder_end = {};
  std::int64_t encoder_longest = 0;
};

struct Forward {
  const ExecCtx& exec;
  const MicroBatch& input;
  Tape* tape = nullptr;    ///< null = nothing is recorded
  bool training = false;   ///< dropout is active
  std::uint32_t step = 0;  ///< keys dropout, with the context's seed
  /// Number of the residual stream's first row's position among those held (sequence parallelism).
  std::int64_t position0 = 0;
  const CachePass* cache = nullptr;  ///< inference only
  /// Where extra losses go; null where the model's own loss is not asked for, and none is computed.
  ExtraLosses* losses = nullptr;
  bool whole_positions = false;            ///< tensor ranks share none, as where text is generated
  const std::uint32_t* step_at = nullptr;  ///< RngKey::step_at, in passes that a graph may repeat
  ContextParallel context = {};            ///< those that hold the other positions of input.part

  /// Adds `values` (fp32 [n]) to the extra loss `name`, which Model::extra_losses() declares. Call it only
  /// where `losses` is there. `own_positions`: see ExtraLoss.
  void add_loss(std::string name, Var values, bool own_positions = false) const {
    losses->push_back({std::move(name), std::move(values), own_positions});
  }

  /// The same pass over the encoder's sequences.
  Forward of_encoder() const {
    TESSERA_CHECK(input.encoder, "an encoder's sequences are asked for, and the micro-batch has none");
    const std::int64_t first = position0 * input.encoder->seq_length / input.seq_length;
    Forward encoder{exec, *input.encoder, tape, training, step, first, nullptr, losses};
    encoder.whole_positions = whole_positions || cache;
    encoder.step_at = step_at;
    return encoder;
  }
  /// Whether an encoder has nothing to do: what it made of these texts is in the cache.
  bool remembers_encoder() const { return cache != nullptr && !input.encoder; }

  /// How tensor ranks share this pass: texts grow by single positions, which nobody can share out.
  TensorParallel shared(TensorParallel tensor) const {
    if (cache != nullptr || whole_positions) tensor.sequence = false;
    return tensor;
  }

  /// The random numbers of this pass at the place called `site`.
  RngKey random(std::string_view site) const { return {exec.seed, site_of(site), step, step_at}; }
  /// Dropout for rows of this micro-batch at the place called `site`; inactive outside training.
  DropoutSpec dropout(std::string_view site, double probability) const {
    return dropout(site, probability, input.seq_length);
  }
  /// The same for a stream of `length` positions, as an encoder's may be.
  DropoutSpec dropout(std::string_view site, double probability, std::int64_t length) const {
    if (!training || probability <= 0.0) return {};
    // Ranks hold equal parts of either stream.
    const std::int64_t first = length == input.seq_length ? position0 : position0 * length / input.seq_length;
    DropoutSpec spec{.key = random(site),
                     .probability = static_cast<float>(probability),
                     .batch = input.batch,
                     .sample0 = input.sample0,
                     .position0 = first,
                     .seq_length = length};
    if (input.part.ranks > 1) {
      const std::vector<SequencePart::Run> runs = input.part.runs();
      spec.seq_length = input.part.length;
      spec.turn = runs[1].held;
      spec.before = runs[0].whole;
      spec.behind = runs[1].whole - runs[1].held;
    }
    return spec;
  }
  /// The tokens as the Var that starts the computation.
  Var tokens() const { return tape ? tape->input(input.tokens, false) : Var(input.tokens); }
};

/// Positions of the sequences that a pass is about: with a cache those before it too.
inline std::int64_t length_of(const Forward& forward) {
  if (forward.cache == nullptr) return forward.input.whole_length();
  return forward.cache->lengths.empty() ? forward.cache->begin + forward.input.seq_length
                                        : forward.cache->longest;
}

}  // namespace tessera
