#pragma once
/// What stacks of the tests have in common: a tied head, and how ranks share their layers.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/engine/engine.hpp"
#include "tessera/nn/layers.hpp"
#include "tessera/nn/stack.hpp"
#include "tessera/pipeline/schedule.hpp"

namespace tessera::test {

/// The head is a token table: the same object on the same rank, else a copy of it under its name.
struct TiedHead : Head {
  TiedHead(std::string name, Parameter* shared, const std::string& table_name, const Shape& shape, float std)
      : Head(std::move(name)),
        norm(submodule<nn::Norm>("head.norm", nn::Norm::Options{.size = shape[1]})),
        table(shared),
        weight(shared != nullptr ? *shared
                                 : parameter(table_name, shape, Init::normal(std),
                                             {.reads_main = true, .tied = true, .counted = false})) {}
  Var forward(const Forward& f, const Flow& flow, Model::Output output, const Tensor&) override {
    const Var y = norm.forward(f, flow.residual, flow.branch, flow.dropout).y;
    Var logits = linear(f.exec, y, weight, nullptr);
    return output == Model::Output::logits ? logits
                                           : cross_entropy(f.exec, std::move(logits), f.input.labels);
  }
  const Parameter* borrowed() const override { return table; }
  nn::Norm& norm;
  Parameter* table;
  Parameter& weight;
};

/// Layers per piece, in the order the model runs, and how ranks share them.
struct LayerCut {
  std::string name;
  std::vector<std::int64_t> layers;
  int stages = 1;
  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
  RecomputeOptions recompute = {};

  int chunks() const { return static_cast<int>(layers.size()) / stages; }
  std::vector<ModelPiece> pieces_of(int stage) const {
    Schedule order;
    order.kind = schedule;
    order.stages = stages;
    order.chunks = chunks();
    std::vector<ModelPiece> pieces;
    for (int chunk = 0; chunk < order.chunks; ++chunk) {
      const auto index = static_cast<std::size_t>(order.piece_of(stage, chunk));
      ModelPiece piece{.first_layer = 0,
                       .num_layers = layers[index],
                       .embedding = index == 0,
                       .head = index + 1 == layers.size()};
      for (std::size_t i = 0; i < index; ++i) piece.first_layer += layers[i];
      pieces.push_back(piece);
    }
    return pieces;
  }
  /// What the engines of such tests have in common.
  EngineOptions engine_options(std::shared_ptr<ProcessMesh> mesh) const {
    EngineOptions options{.steps = 4, .micro_batch_size = 1};
    options.optimizer.lr = 1e-2;
    options.lr_schedule.style = LrStyle::constant;
    options.layout.mesh = std::move(mesh);
    options.layout.schedule = schedule;
    options.layout.chunks = chunks();
    return options;
  }
};

}  // namespace tessera::test
