#include "tessera/engine/run_exchange.hpp"

#include <nlohmann/json.hpp>
#include <unordered_map>

#include "base/json_reason.hpp"
#include "checkpoint/file_io.hpp"
#include "engine/run_identity.hpp"
#include "tessera/base/config_file.hpp"
#include "tessera/checkpoint/checkpoint.hpp"
#include "tessera/checkpoint/hf.hpp"
#include "tessera/checkpoint/staged_directory.hpp"
#include "tessera/engine/run_lock.hpp"
#include "tessera/engine/state.hpp"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// How a checkpoint begins a tensor's name.
std::string prefix_of(RunValue value) {
  switch (value) {
    case RunValue::exp_avg:
      return "adam_m.";
    case RunValue::exp_avg_sq:
      return "adam_v.";
    case RunValue::weight:
      break;
  }
  return "param.";
}

std::vector<CheckpointTensor> tensors_of(const RunSource& source) {
  std::vector<CheckpointTensor> tensors;
  for (const RunValue value : kRunValues) {
    for (const TensorSpec& spec : source.parameters()) {
      tensors.push_back({.name = prefix_of(value) + spec.name,
                         .dtype = DType::f32,
                         .shape = spec.shape,
                         .slice = TensorSlice::whole(spec.shape),
                         .read = [&source, value, spec] {
                           const auto values = std::make_shared<std::vector<float>>(
                               static_cast<std::size_t>(spec.shape.numel()));
                           source.read(value, spec.name, *values);
                           return std::shared_ptr<const std::byte>(
                               values, reinterpret_cast<const std::byte*>(values->data()));
                         }});
    }
  }
  return tensors;
}

CheckpointState state_of(const Config& config, const RunCounters& c, const std::string& run) {
  CheckpointState state;
  state.step = c.step;
  state.consumed_samples = c.consumed_samples;
  state.config_json = nlohmann::json{{"yaml", to_yaml(config)}}.dump();
  state.rng_json = nlohmann::json{{"seed", config.training.seed}, {"step", c.step}}.dump();
  state.data_json = nlohmann::json{{"consumed_samples", c.consumed_samples}}.dump();
  state.user_json = nlohmann::json{{"optimizer_updates", c.updates},
                                   {"loss_scale", c.loss_scale},
                                   {"loss_scale_good_steps", c.good_steps},
                                   {"loss_scale_hysteresis", c.hysteresis},
                                   {"tokens", c.tokens},
                                   {"skipped", c.skipped},
                                   {"fewer_updates", nlohmann::json::object()}}
                        .dump();
  state.run = run;
  return state;
}

/// A checkpoint of one of our runs.
class SavedRun final : public RunSource {
 public:
  explicit SavedRun(const fs::path& checkpoint) : reader_(checkpoint) {
    const RunState run = read_run_state(reader_);
    config_ = run.config;
    const auto fail = [&](const std::string& reason) {
      checkpoint_detail::bad_file(reader_.dir(), "", reason,
                                  "Convert the weights alone, without --with_optimizer.");
    };
    if (config_.optimizer.name == OptimizerName::sgd)
      fail("its optimizer is sgd; that of adam and adamw is converted");
    try {
      const auto user = nlohmann::json::parse(reader_.state().user_json);
      if (user.contains("accumulated"))
        fail("it was saved between two calls of one update, with their gradient");
      if (user.contains("fewer_updates") && !user.at("fewer_updates").empty())
        fail(user.at("fewer_updates").items().begin().key() + " has had fewer updates than other parameters");
      counters_ = {.step = run.step,
                   .consumed_samples = run.consumed_samples,
                   .updates = whole_number<std::int64_t>(user.at("optimizer_updates")),
                   .tokens = run.tokens,
                   .skipped = run.skipped,
                   .loss_scale = user.value("loss_scale", 1.0),
                   .good_steps = whole_number_or(user, "loss_scale_good_steps", std::int64_t{0}),
                   .hysteresis = whole_number_or(user, "loss_scale_hysteresis", std::int64_t{0})};
    } catch (const nlohmann::json::exception& error) {
      fail(reason_of(error));
    }
    specs_ = parameter_specs(architecture_of(config_.model));
    for (const RunValue value : kRunValues) {
      for (const TensorSpec& spec : specs_) {
        const Manifest::Tensor* found = reader_.find(prefix_of(value) + spec.name);
        if (!found || found->shape != spec.shape || found->dtype != DType::f32)
          fail(prefix_of(value) + spec.name +
               (found ? " is of another shape than its model's" : " is missing"));
      }
    }
  }

  const Config& config() const override { return config_; }
  const RunCounters& counters() const override { return counters_; }
  std::vector<TensorSpec> parameters() const override { return specs_; }
  void read(RunValue value, const std::string& name, std::span<float> out) const override {
    reader_.read(prefix_of(value) + name, std::as_writable_bytes(out));
  }

 private:
  CheckpointReader reader_;
  Config config_ = Settings{};
  RunCounters counters_;
  std::vector<TensorSpec> specs_;
};

}  // namespace

void write_run(const fs::path& out, const RunSource& source) {
  checkpoint_detail::require_unused(out);
  Config config = source.config();
  const fs::path folder = fs::absolute(out / "").lexically_normal().parent_path();
  config.logging.dir = folder.string();
  config.checkpoint.dir.reset();
  config.checkpoint.resume = "auto";
  validate(config);
  const std::string run = random_name(16);
  const std::vector<CheckpointTensor> tensors = tensors_of(source);
  std::uint64_t bytes = 0;
  for (const CheckpointTensor& each : tensors) bytes += static_cast<std::uint64_t>(each.shape.numel()) * 4;
  checkpoint_detail::require_room_for(folder, bytes);
  StagedDirectory staged(folder, Existing::refuse);
  save_checkpoint(staged.path() / "checkpoints", state_of(config, source.counters(), run), tensors);
  checkpoint_detail::write_text(staged.path() / "config.yaml", to_yaml(config));
  write_identity(staged.path(), {.id = run, .folder = folder.string()});
  staged.publish();
}

std::unique_ptr<RunSource> open_run(const fs::path& checkpoint) {
  return std::make_unique<SavedRun>(checkpoint);
}

}  // namespace tessera
