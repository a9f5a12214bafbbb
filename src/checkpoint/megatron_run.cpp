#include <algorithm>

#include "checkpoint/file_io.hpp"
#include "checkpoint/hf_names.hpp"
#include "checkpoint/megatron_model.hpp"
#include "tessera/base/precision.hpp"

namespace tessera {

using namespace checkpoint_detail;

namespace {

/// A model registers the copy of a tied embedding before the head for masked tokens, and saves it behind.
void order_as_registered(std::vector<RankParameter>& parameters) {
  const auto named = [&](std::string_view begin) {
    return std::find_if(parameters.begin(), parameters.end(),
                        [&](const RankParameter& each) { return each.name.starts_with(begin); });
  };
  const auto copy = named("word_embeddings_for_head."), head = named("lm_head.");
  if (copy != parameters.end() && head < copy) std::rotate(head, copy, copy + 1);
}

class MegatronRun final : public RunSource {
 public:
  explicit MegatronRun(std::unique_ptr<MegatronModel::Impl> impl) : impl_(std::move(impl)) {}
  const Config& config() const override { return impl_->run->config; }
  const RunCounters& counters() const override { return impl_->run->training.counters; }
  std::vector<TensorSpec> parameters() const override { return parameter_specs(impl_->architecture); }
  void read(RunValue value, const std::string& name, std::span<float> out) const override {
    impl_->read(value, name, out);
  }

 private:
  std::unique_ptr<MegatronModel::Impl> impl_;
};

}  // namespace

void MegatronModel::Impl::take_facts(const OptimizerFacts& facts, const std::filesystem::path& file) {
  RunCounters& c = run->training.counters;
  if (run->counted && facts.updates != c.updates)
    bad_file(file, "optimizer",
             detail::concat("has made ", facts.updates, " updates, that of the first rank ", c.updates),
             "All ranks' files have to be of one checkpoint.");
  c.updates = facts.updates;
  run->counted = true;
  if (facts.scaler) {
    c.loss_scale = facts.scaler->loss_scale;
    c.good_steps = facts.scaler->good_steps;
    c.hysteresis = facts.scaler->hysteresis;
  } else {
    const TrainingConfig& t = run->training.settings.training;
    c.loss_scale = t.precision == Precision::fp16 ? t.loss_scale.value_or(t.initial_loss_scale) : 1;
    c.hysteresis = t.hysteresis;
  }
}

/// Adds, to what is kept of each chunk by value, the optimizer's tensors under the names of the weights.
void MegatronModel::Impl::take_optimizer(const std::vector<Chunk>& chunks, std::int64_t stage,
                                         std::array<std::vector<Chunk>, 3>& to, SymbolicLinks links) {
  const bool tied = *settings.tied_head;
  std::vector<RankParameter> parameters;
  for (std::size_t chunk = 0; chunk < chunks.size(); ++chunk) {
    for (const auto& [name, tensor_of_it] : chunks[chunk].tensors) {
      const std::optional<MegatronName> known = megatron_name(name, two_stacks);
      const bool copy = known && known->tied_copy && tied;
      if (known && (known->ignored || known->again || (copy && pipeline == 1))) continue;
      parameters.push_back({name, tensor_of_it, chunk,
                            tied && pipeline > 1 && (copy || (known && known->ours == kEmbedding))});
    }
  }
  order_as_registered(parameters);
  const TorchFile& file = *chunks.front().file;
  const RankOptimizer found =
      read_rank_optimizer({file, parameters, chunks.size(), stage, data, links}, files);
  take_facts(found.said, file.path());
  for (std::vector<Chunk>& each : to) each.assign(chunks.size(), {found.file, {}});
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const ParameterState& state = found.parameters[i];
    const std::array<const TorchTensor*, 3> values = {&state.main, &state.exp_avg, &state.exp_avg_sq};
    for (std::size_t value = 0; value < values.size(); ++value)
      to[value][parameters[i].chunk].tensors.emplace_back(parameters[i].name, *values[value]);
  }
}

void MegatronModel::Impl::settle_run() {
  Settings config = run->training.settings;
  RunCounters& c = run->training.counters;
  const DType wanted = dtype_of_precision(config.training.precision);
  for (const auto& [name, each] : weights.tensors) {
    if (each.dtype() != wanted)
      bad_file(dir, name, detail::concat("is ", each.dtype(), "; the arguments (bf16, fp16) imply ", wanted),
               kWeightsAlone);
  }
  for (Set& set : run->values) {
    for (auto& [name, each] : set.tensors) each.shape = weights.tensors.at(name).shape;
    settle_copies(set);
  }
  if (c.updates > c.step)
    bad_file(dir, "optimizer", detail::concat("has made ", c.updates, " updates in ", c.step, " iterations"),
             kWeightsAlone);
  c.skipped = c.step - c.updates;
  if (!two_stacks) config.training.decoder_seq_length.reset();  // of no meaning there
  config.model = architecture.model;
  config.model.dropout = settings.dropout;  // what the architecture does not say
  config.model.attention_dropout = settings.attention_dropout;
  config.model.init_std = settings.init_std;
  run->config = config;
}

void MegatronModel::Impl::read(RunValue value, const std::string& name, std::span<float> out) const {
  const StoredTensor& from = run->values[static_cast<std::size_t>(value)].tensors.at(name);
  TESSERA_CHECK_EQ(static_cast<std::int64_t>(out.size()), from.shape.numel(), "elements of '", name, "'");
  const std::span<std::byte> bytes = std::as_writable_bytes(out);
  read_stored(from, name, order(), bytes);
  const StoredTensor& weight = weights.tensors.at(name);
  const bool same = from.ranks[0].first == weight.ranks[0].first &&
                    from.ranks[0].second.storage == weight.ranks[0].second.storage;
  if (value != RunValue::weight || same) return;
  std::vector<std::byte> stored(out.size() * size_of(weight.dtype())), rounded(stored.size());
  read(name, stored);
  convert_floats(DType::f32, bytes, weight.dtype(), rounded);
  if (stored != rounded)
    bad_file(
        from.ranks[0].first->path(), "the optimizer's weights",
        "rounded they are not the model's: " + name + " differs",
        "Either the two are of different moments, or the optimizer's buckets were of another size than the "
        "arguments say. Convert the weights alone, without --with_optimizer.");
}

std::unique_ptr<RunSource> open_megatron_run(const std::filesystem::path& dir,
                                             const MegatronReadOptions& options,
                                             std::vector<std::string>& notes) {
  auto impl = std::make_unique<MegatronModel::Impl>();
  impl->dir = dir;
  impl->load(options, true);
  notes = impl->notes;
  return std::make_unique<MegatronRun>(std::move(impl));
}

}  // namespace tessera
