#include <array>

#include "checkpoint/file_io.hpp"
#include "tessera/checkpoint/hf.hpp"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// The model of config.json with what settings alone say of it.
ModelSettings model_of(const ModelConfig& settings, const Architecture& found) {
  ModelSettings model = found.model;
  model.dropout = settings.dropout;
  model.attention_dropout = settings.attention_dropout;
  model.init_std = settings.init_std;
  const ModelConfig given = architecture_of(settings).model;
  TESSERA_ENSURE(ConfigError, given == found.model || given == architecture_of(ModelSettings{}).model,
                 "the section `model` of the settings is not the model of config.json. Leave it out");
  return model;
}

class TorchRun final : public RunSource {
 public:
  TorchRun(std::array<std::unique_ptr<HfModel>, 3> values, Config config, RunCounters counters)
      : values_(std::move(values)), config_(std::move(config)), counters_(counters) {}
  const Config& config() const override { return config_; }
  const RunCounters& counters() const override { return counters_; }
  std::vector<TensorSpec> parameters() const override { return parameter_specs(values_[0]->config()); }
  void read(RunValue value, const std::string& name, std::span<float> out) const override {
    values_[static_cast<std::size_t>(value)]->read_f32(name, out);
  }

 private:
  std::array<std::unique_ptr<HfModel>, 3> values_;  // by RunValue
  Config config_;
  RunCounters counters_;
};

RunCounters counters_of(const TorchFacts& facts, const Config& config, const fs::path& dir) {
  const TrainingConfig& t = config.training;
  if (facts.updates < 0)
    checkpoint_detail::bad_file(dir, "the optimizer", "does not say how many updates it has made",
                                "Convert the weights alone, without --with_optimizer.");
  RunCounters c;
  c.updates = facts.updates;
  c.step = std::max(facts.updates, facts.steps);
  c.skipped = c.step - c.updates;
  c.consumed_samples = facts.samples >= 0 ? facts.samples : c.step * t.global_batch_size;
  c.tokens = c.consumed_samples * t.seq_length;
  c.loss_scale = t.precision == Precision::fp16 ? t.loss_scale.value_or(t.initial_loss_scale) : 1;
  c.hysteresis = t.hysteresis;
  TESSERA_ENSURE(ConfigError, c.step < t.steps, "training.steps (", t.steps, "): the checkpoint is of step ",
                 c.step, ", so the run would be over");
  return c;
}

}  // namespace

std::unique_ptr<RunSource> open_torch_run(TorchFormat format, const fs::path& dir,
                                          const fs::path& config_path, const Config& settings,
                                          TorchFacts& facts, SymbolicLinks links) {
  TESSERA_ENSURE(ConfigError, settings.optimizer.name != OptimizerName::sgd,
                 "optimizer.name is sgd; the checkpoint's moments are Adam's");
  std::array<std::unique_ptr<HfModel>, 3> values;
  for (const RunValue value : kRunValues) {
    TorchFacts each;
    values[static_cast<std::size_t>(value)] =
        std::make_unique<HfModel>(open_torch(format, dir, config_path, each, links, value));
    if (value == RunValue::weight) facts = each;
    if (each.updates >= 0) facts.updates = each.updates;
    facts.steps = std::max(facts.steps, each.steps);
    facts.samples = std::max(facts.samples, each.samples);
  }
  Settings given = settings;
  given.model = model_of(settings.model, values[0]->config());
  const Config config = given;
  const RunCounters counters = counters_of(facts, config, dir);
  return std::make_unique<TorchRun>(std::move(values), config, counters);
}

}  // namespace tessera
