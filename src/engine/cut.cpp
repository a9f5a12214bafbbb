/// Which layers a pipeline stage holds.

#include "engine/dry_terms.hpp"
#include "tessera/base/config.hpp"
#include "tessera/engine/build.hpp"

namespace tessera {

namespace detail {

double time_of(const WorkRecord& work) { return work.flops + work.bytes; }

PartCosts part_costs(const Config& given) {
  Config config = given;
  config.parallel = {};
  config.offload = {};
  // However a run recomputes and whatever it fits on one device at once, its stages are the same.
  config.training.recompute = Recompute::none;
  const std::int64_t layers = config.model.num_layers;
  const std::int64_t encoder = config.model.encoder_layers.value_or(0);
  std::vector<ModelPiece> parts = {{0, 0, true, false}, {0, 1, false, false}};
  if (encoder > 0) parts.push_back({layers - 1, 1, false, false});  // the decoder's
  parts.push_back({layers, 0, false, true});
  std::vector<double> costs(parts.size());
  const int count = static_cast<int>(parts.size());
  for (int i = 0; i < count; ++i) {
    DryRank rank(
        [&](ProcessMesh& mesh) {
          return make_model(config, mesh, {parts[static_cast<std::size_t>(i)]}, {DeviceType::meta});
        },
        EngineOptions::from(config), {.pp = count}, i, size_of(config, 1));
    for (const PieceRecord& piece : rank.pieces(false))
      costs[static_cast<std::size_t>(i)] += time_of(piece.forward) + time_of(piece.backward);
  }
  PartCosts result{.layer = costs[1], .embedding = costs.front(), .head = costs.back()};
  if (encoder > 0) {
    result.layers.assign(static_cast<std::size_t>(encoder), costs[1]);
    result.layers.resize(static_cast<std::size_t>(layers), costs[2]);
  }
  return result;
}

}  // namespace detail

namespace {

/// Of an encoder and a decoder on stages of their own: each cut by itself.
std::vector<PieceLayers> cut_at_split(const Config& config,
                                      const std::function<PartCosts(const Config&)>& costs) {
  const std::int64_t encoder = *config.model.encoder_layers, layers = config.model.num_layers;
  const auto split = static_cast<int>(*config.parallel.pipeline_split_rank);
  const int stages = static_cast<int>(config.parallel.pipeline);
  const PartCosts whole = encoder > split || layers - encoder > stages - split ? costs(config) : PartCosts{};
  const auto part = [&](std::int64_t first, std::int64_t count, int own_stages, double front, double head) {
    const double layer = whole.layers.empty() ? 1 : whole.layers[static_cast<std::size_t>(first)];
    std::vector<PieceLayers> pieces =
        cut_layers(count, own_stages, std::nullopt, {.layer = layer, .embedding = front, .head = head});
    for (PieceLayers& piece : pieces) piece = {piece.first + first, piece.count, false, false};
    return pieces;
  };
  std::vector<PieceLayers> pieces = part(0, encoder, split, whole.embedding, 0);
  for (const PieceLayers& piece : part(encoder, layers - encoder, stages - split, 0, whole.head))
    pieces.push_back(piece);
  pieces.front().embedding = pieces.back().head = true;
  return pieces;
}

}  // namespace

std::vector<std::vector<ModelPiece>> all_pieces_of(const Config& config,
                                                   const std::function<PartCosts(const Config&)>& costs) {
  const ParallelConfig& parallel = config.parallel;
  Schedule schedule;
  schedule.kind = parallel.schedule;
  schedule.stages = static_cast<int>(parallel.pipeline);
  schedule.chunks = pieces_per_stage(parallel);
  const bool splits = parallel.pipeline_split_rank && schedule.pieces() > 1;
  const bool asks = !parallel.pipeline_layout && !splits && schedule.pieces() > 1 &&
                    config.model.num_layers > schedule.pieces();
  const auto layers = splits ? cut_at_split(config, costs)
                             : cut_layers(config.model.num_layers, schedule, parallel.pipeline_layout,
                                          asks ? costs(config) : PartCosts{});
  std::vector<std::vector<ModelPiece>> pieces(static_cast<std::size_t>(schedule.stages));
  for (int stage = 0; stage < schedule.stages; ++stage) {
    for (int chunk = 0; chunk < schedule.chunks; ++chunk) {
      const PieceLayers& piece = layers[static_cast<std::size_t>(schedule.piece_of(stage, chunk))];
      pieces[static_cast<std::size_t>(stage)].push_back(
          {piece.first, piece.count, piece.embedding, piece.head});
    }
  }
  return pieces;
}

std::vector<std::vector<ModelPiece>> all_pieces_of(const Config& config) {
  return all_pieces_of(config, detail::part_costs);
}

std::vector<ModelPiece> pieces_of(const Config& config, int stage) {
  return all_pieces_of(config).at(static_cast<std::size_t>(stage));
}

}  // namespace tessera
