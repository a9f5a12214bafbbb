// A model of your own: declare its parts, write its forward; the engine trains it. This one predicts the next
// letter from the current one and its position with a two-layer network, and learns to recite a line.

#include <iostream>
#include <tessera/tessera.hpp>

using namespace tessera;

struct Reciter : Model {
  Reciter(std::int64_t vocab, std::int64_t length, std::int64_t width)
      : vocab_(vocab),
        length_(length),
        embedding_(submodule<nn::Embedding>(
            "embedding",
            nn::Embedding::Options{.vocab_size = vocab, .size = width, .max_positions = length})),
        norm_(submodule<nn::Norm>("norm", nn::Norm::Options{.size = width})),
        hidden_(submodule<nn::Linear>("hidden", nn::Linear::Options{.in = width, .out = 4 * width})),
        head_(submodule<nn::Linear>("head", nn::Linear::Options{.in = 4 * width, .out = vocab})) {}

  Var forward(const Forward& f) override {
    const Var x_sbh = norm_.forward(f, embedding_.forward(f), {}).y;
    const Var h_sbf = activation(f.exec, hidden_.forward(f, x_sbh), ops::ActivationKind::gelu_tanh);
    return head_.forward(f, h_sbf);  // [seq, batch, vocab]
  }
  std::int64_t vocab_size() const override { return vocab_; }
  std::int64_t max_positions() const override { return length_; }

  std::int64_t vocab_, length_;
  nn::Embedding& embedding_;
  nn::Norm& norm_;
  nn::Linear& hidden_;
  nn::Linear& head_;
};

int main() {
  const std::string line = "A tessera is one tile of a mosaic: one shard.";
  const auto length = static_cast<std::int64_t>(line.size()) - 1;
  Batch batch{.batch = 1, .seq_length = length};
  batch.tokens.assign(line.begin(), line.end() - 1);
  batch.labels.assign(line.begin() + 1, line.end());

  EngineOptions options{.steps = 100};
  options.optimizer.lr = 1e-2;
  options.lr_schedule.warmup_steps = 10;
  Engine engine(std::make_unique<Reciter>(128, length, 32), options, ExecCtx::cpu(/*threads=*/1, /*seed=*/1));
  for (int step = 1; step <= 100; ++step) {
    const StepReport report = engine.step(batch);
    if (step % 20 == 0) std::cout << "step " << step << "  loss " << report.loss << "\n";
  }
  return engine.evaluate(batch) < 0.1 ? 0 : 1;
}
