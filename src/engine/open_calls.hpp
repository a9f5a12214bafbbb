#pragma once
#include "engine/stage.hpp"
#include "tessera/engine/engine.hpp"

namespace tessera {

/// `engine` is null once the gradient was added or forgotten, or the engine is gone.
struct OpenCall::State {
  Engine* engine = nullptr;
  double loss = 0;
  GradientMemory aside = {};  ///< the gradient; undefined while it is still in the buckets

  State(Engine& of, double mean_loss) : engine(&of), loss(mean_loss) {}
  ~State();
  State(const State&) = delete;
  State& operator=(const State&) = delete;
};

/// `engine` is null once the engine is gone, `stage` once its tapes were used or forgotten.
struct OpenForward::State {
  Engine* engine = nullptr;
  std::int64_t number = 0;
  Engine::Output output = Engine::Output::logits;
  Batch batch = {};
  std::unique_ptr<Stage> stage = {};

  State(Engine& of, Batch computed) : engine(&of), batch(std::move(computed)) {}
  ~State();
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  void forget() {
    stage.reset();
    batch = {};
  }
};

}  // namespace tessera
