/// Which layers a pipeline stage holds.

#include "engine/dry_terms.hpp"
#include "tessera/base/config_file.hpp"
#include "tessera/engine/build.hpp"

namespace tessera {

namespace detail {

double time_of(const WorkRecord& work) { return work.flops + work.bytes; }

PartCosts part_costs(const Config& given) {
  Config config = given;
  config.parallel = {};
  // However a run recomputes and whatever it fits on one device at once, its stages are the same.
  config.training.recompute = Recompute::none;
  const ModelPiece parts[] = {{0, 0, true, false}, {0, 1, false, false}, {1, 0, false, true}};
  double costs[3] = {};
  for (int i = 0; i < 3; ++i) {
    DryRank rank([&](ProcessMesh& mesh) { return make_model(config, mesh, {parts[i]}, {DeviceType::meta}); },
                 EngineOptions::from(config), {.pp = 3}, i, size_of(config, 1));
    for (const PieceRecord& piece : rank.pieces(false))
      costs[i] += time_of(piece.forward) + time_of(piece.backward);
  }
  return {.layer = costs[1], .embedding = costs[0], .head = costs[2]};
}

}  // namespace detail

std::vector<std::vector<ModelPiece>> all_pieces_of(const Config& config,
                                                   const std::function<PartCosts(const Config&)>& costs) {
  const ParallelConfig& parallel = config.parallel;
  Schedule schedule;
  schedule.kind = parallel.schedule;
  schedule.stages = static_cast<int>(parallel.pipeline);
  schedule.chunks = pieces_per_stage(parallel);
  const bool asks =
      !parallel.pipeline_layout && schedule.pieces() > 1 && config.model.num_layers > schedule.pieces();
  const auto layers = cut_layers(config.model.num_layers, schedule, parallel.pipeline_layout,
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
