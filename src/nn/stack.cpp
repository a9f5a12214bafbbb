#include "tessera/nn/stack.hpp"

#include <algorithm>
#include <memory>
#include <numeric>
#include <string_view>
#include <utility>

#include "nn/own_positions.hpp"
#include "tessera/autograd/recompute.hpp"
#include "tessera/base/cache_page.hpp"
#include "tessera/base/config.hpp"
#include "tessera/base/precision.hpp"
#include "tessera/ops/elementwise.hpp"
#include "tessera/ops/embedding.hpp"

namespace tessera {
namespace {

/// The values of a flow that leave a piece or a recomputed segment: the branch is added before.
struct Named {
  std::string_view name;
  Var Flow::*value;
  bool own = false;  ///< each tensor rank has another one
};
constexpr Named kValues[] = {{"residual", &Flow::residual},
                             {"memory", &Flow::memory},
                             {"bias", &Flow::bias, true},
                             {"decoder_input", &Flow::decoder_input}};

Var& value_of(Flow& flow, const std::string& name) {
  for (const Named& known : kValues) {
    if (name == known.name) return flow.*known.value;
  }
  throw InvalidArgument("a flow has no value '" + name +
                        "': Stack::flow_before names residual, memory, bias and decoder_input");
}

/// The flow with its branch added, as it leaves a piece or enters a recomputed segment.
Flow folded(const ExecCtx& ctx, Flow flow) {
  flow.residual = fold(ctx, flow);
  flow.branch = Var();
  flow.dropout = {};
  return flow;
}

std::vector<Var> values_of(Flow flow) {
  std::vector<Var> values;
  for (const Named& known : kValues) values.push_back(std::move(flow.*known.value));
  return values;
}

Flow flow_of(const std::vector<Var>& values) {
  Flow flow;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i]) flow.*kValues[i].value = values[i];
  }
  return flow;
}

Flow run_block(const Forward& forward, Block& block, Flow flow) {
  const bool remembers = static_cast<bool>(flow.memory);
  flow = block.forward(forward, std::move(flow));
  TESSERA_CHECK(!remembers || flow.memory, "block '", block.name(),
                "' got an encoder's memory and does not pass it on: it must return the Flow it was given, "
                "changed");
  return flow;
}

}  // namespace

Numerics numerics_of(const TrainingConfig& training) {
  const DType compute = dtype_of_precision(training.precision);
  return {compute, training.fp32_residual ? DType::f32 : compute};
}

Var fold(const ExecCtx& ctx, const Flow& flow) {
  if (!flow.branch) return flow.residual;
  return add(ctx, flow.residual, dropout(ctx, flow.branch, flow.dropout));
}

Stack::Stack(std::int64_t hidden_size, std::int64_t num_layers, const Numerics& numerics,
             const Sharding& sharding)
    : hidden_size_(hidden_size), numerics_(numerics), sharding_(sharding) {
  if (sharding_.pieces.empty()) sharding_.pieces = {{0, num_layers, true, true}};
}

bool Stack::holds_head() const {
  return std::ranges::any_of(sharding_.pieces, [](const ModelPiece& p) { return p.head; });
}

Var Stack::forward(const Forward& forward) { return run_all(forward, Output::logits, Tensor()); }

Var Stack::loss(const Forward& forward, const Tensor& upstream) {
  return run_all(forward, Output::losses, upstream);
}

Var Stack::run_all(const Forward& forward, Output output, const Tensor& upstream) {
  std::vector<Var> values;
  for (int piece = 0; piece < num_pieces(); ++piece)
    values = run_piece(forward, piece, values, output, upstream);
  return values.at(0);
}

std::vector<Var> Stack::run_piece(const Forward& whole, int index, const std::vector<Var>& inputs,
                                  Output output, const Tensor& upstream) {
  TESSERA_CHECK(index >= 0 && index < num_pieces(), "piece ", index, " of ", num_pieces());
  const Piece& piece = piece_at(index);
  MicroBatchSize size = whole.input.size();
  if (whole.cache != nullptr) {
    size.generates = true;
    size.capacity = whole.cache->cache->capacity;
  }
  const std::vector<Port> ports = this->inputs(index, size);
  TESSERA_CHECK(inputs.size() == ports.size(), "piece ", index, " gets ", inputs.size(), " values of ",
                ports.size(), ": the first piece of a model begins with tokens, and no other does");
  prepare(whole);
  const Forward forward = on_own_positions(whole, sharding_.tensor);
  Flow flow;
  for (std::size_t i = 0; i < ports.size(); ++i) value_of(flow, ports[i].name) = inputs[i];
  for (const Run& run : piece.runs) {
    if (run.front != nullptr) flow = run_block(whole, *run.front, folded(whole.exec, std::move(flow)));
    flow = run_layers(forward, run.layers, std::move(flow));
  }
  if (piece.head != nullptr && forward.cache != nullptr && forward.cache->last) {
    if (forward.cache->last.numel() == 0) return {};
    flow = last_rows(forward, flow);
  }
  if (piece.head != nullptr) return {piece.head->forward(forward, flow, output, upstream)};
  flow = folded(forward.exec, std::move(flow));
  std::vector<Var> results;
  for (const Port& port : outputs(index, size)) {
    results.push_back(value_of(flow, port.name));
    TESSERA_CHECK(results.back(), "piece ", index, " has no '", port.name,
                  "' to pass on, which Stack::flow_before names");
  }
  return results;
}

Flow Stack::last_rows(const Forward& forward, const Flow& flow) {
  const Tensor& last = forward.cache->last;
  const Tensor rows = fold(forward.exec, flow).value();
  const std::int64_t width = rows.size(-1);
  Flow picked;
  ops::EmbeddingOptions options;
  options.out = rows.dtype();
  picked.residual =
      ops::embedding(forward.exec, last.view({1, last.numel()}), rows.view({-1, width}), {}, {}, options);
  return picked;
}

Flow Stack::run_layers(const Forward& forward, const std::vector<Block*>& layers, Flow flow) {
  const RecomputeOptions& again = sharding_.recompute;
  const bool recomputes = again.what == Recompute::full && forward.tape != nullptr;
  const auto count = layers.size(), n = static_cast<std::size_t>(again.layers);
  for (std::size_t i = 0; i < count;) {
    if (recomputes && (again.method == RecomputeMethod::uniform || i < n)) {
      const std::size_t size = segment(i, count);
      flow = run_recomputed(forward, layers, i, size, std::move(flow));
      i += size;
    } else {
      flow = run_block(forward, *layers[i++], std::move(flow));
    }
  }
  return flow;
}

Flow Stack::run_recomputed(const Forward& forward, const std::vector<Block*>& all, std::size_t first,
                           std::size_t count, Flow flow) {
  const auto begin = all.begin() + static_cast<std::ptrdiff_t>(first);
  std::vector<Block*> layers(begin, begin + static_cast<std::ptrdiff_t>(count));
  std::vector<Parameter*> parameters;
  for (Block* layer : layers) {
    for (Parameter* p : layer->parameters()) {
      if (p->trained()) parameters.push_back(p);
    }
  }
  // `forward` refers to the context and the micro-batch, which outlive the tape; its own tape is not used
  // here. What the layers leave as it is comes out as it went in, and behind it their extra losses.
  const auto found = std::make_shared<ExtraLosses>();
  const bool wants_losses = forward.losses != nullptr;
  const auto part = [forward, found, wants_losses,
                     layers = std::move(layers)](const std::vector<Var>& inputs) {
    ExtraLosses losses;
    Forward own = forward;
    own.losses = wants_losses ? &losses : nullptr;
    Flow inner = flow_of(inputs);
    for (Block* layer : layers) inner = run_block(own, *layer, std::move(inner));
    std::vector<Var> values = values_of(folded(forward.exec, std::move(inner)));
    for (ExtraLoss& loss : losses) values.push_back(std::exchange(loss.values, Var()));
    *found = std::move(losses);
    return values;
  };
  const bool partition = sharding_.recompute.partition && !sharding_.tensor.sharded_sequence();
  std::vector<Var> values =
      recompute(forward.exec, values_of(folded(forward.exec, std::move(flow))), std::move(parameters), part,
                partition ? sharding_.tensor.comm : nullptr, [](std::size_t i) { return kValues[i].own; });
  for (std::size_t i = 0; i < found->size(); ++i) {
    ExtraLoss& loss = (*found)[i];
    forward.losses->push_back({loss.name, std::move(values[std::size(kValues) + i]), loss.own_positions});
  }
  values.resize(std::size(kValues));
  return flow_of(values);
}

void Stack::settle_shared() {
  const Parameter* const borrowed = pieces_.back().head->borrowed();
  const auto has = [&](Block* block) {
    if (block == nullptr) return false;
    const std::vector<Parameter*> parameters = block->parameters();
    return std::ranges::find(parameters, borrowed) != parameters.end();
  };
  const bool own = std::ranges::any_of(pieces_.back().runs, [&](const Run& run) {
    return has(run.front) || std::ranges::any_of(run.layers, has);
  });
  // A piece that holds the parameter as well uses it once.
  shared_ = own ? nullptr : borrowed;
}

Port Stack::stream(const std::string& name, const MicroBatchSize& size) const {
  const std::int64_t ranks =
      sharding_.tensor.sharded_sequence() && !size.generates ? sharding_.tensor.size() : 1;
  return {Shape{size.seq_length / ranks, size.batch, hidden_size_}, numerics_.residual, name};
}

std::vector<Port> Stack::flow_before(std::int64_t, const MicroBatchSize& size) const {
  return {stream("residual", size)};
}

std::vector<Port> Stack::inputs(int piece, const MicroBatchSize& size) const {
  const ModelPiece& place = place_of(piece);
  return place.embedding ? std::vector<Port>() : flow_before(place.first_layer, size);
}

std::vector<Port> Stack::outputs(int piece, const MicroBatchSize& size) const {
  const ModelPiece& place = place_of(piece);
  return place.head ? std::vector<Port>() : flow_before(place.first_layer + place.num_layers, size);
}

void Stack::check_generates(std::int64_t) const {
  for (const Piece& piece : pieces_) {
    // Its encoder would see each new token alone.
    TESSERA_CHECK(piece.runs.size() <= 1, "text is generated by models of one stack of layers; this one has ",
                  piece.runs.size(), ", and what an encoder makes is not cached");
  }
}

KvCache Stack::make_cache(const ExecCtx& ctx, std::int64_t rows, std::int64_t capacity,
                          std::int64_t encoder_capacity) const {
  check_generates(0);
  KvCache cache{.rows = rows, .capacity = capacity, .encoder_capacity = encoder_capacity};
  const std::int64_t entries = cache_pages(capacity), pages = rows * entries;
  std::vector<std::int32_t> table(static_cast<std::size_t>(pages));
  std::iota(table.begin(), table.end(), 0);
  cache.pages = Tensor::from(ctx, table, {rows, entries});
  // Zeros: a key that a query does not see has the weight 0 on some devices, and 0 times anything is not
  // always 0.
  const auto put = [&](std::vector<Tensor>& side, std::size_t layer, const Shape& shape) {
    side.resize(std::max(side.size(), layer + 1));
    side[layer] = Tensor::empty(ctx, shape, numerics_.compute);
    ops::fill_zero(ctx, side[layer]);
  };
  for (int i = 0; i < num_pieces(); ++i) {
    auto layer = static_cast<std::size_t>(place_of(i).first_layer);
    for (const Run& run : piece_at(i).runs) {
      for (const Block* block : run.layers) {
        const Block::CacheShape kept = block->cache_shape();
        for (std::vector<Tensor>* side : {&cache.key, &cache.value})
          if (kept.kv_heads > 0) put(*side, layer, {pages, kept.kv_heads, kCachePage, kept.head_dim});
        for (std::vector<Tensor>* side : {&cache.cross_key, &cache.cross_value})
          if (kept.reads_encoder) put(*side, layer, {rows, kept.kv_heads, encoder_capacity, kept.head_dim});
        ++layer;
      }
    }
  }
  return cache;
}

}  // namespace tessera
