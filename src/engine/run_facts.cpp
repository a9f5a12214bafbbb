#include "tessera/engine/run_facts.hpp"

#include "tessera/base/config.hpp"
#include "tessera/comm/placement.hpp"
#include "tessera/engine/build.hpp"

namespace tessera {
namespace {

/// "25129, 25128", "3 x 12565, 12562": the sizes of the parts, in the ranks' order.
std::string parts_text(std::int64_t whole, int parts) {
  std::string text;
  for (int first = 0; first < parts;) {
    const std::int64_t size = part_of(whole, first, parts).count;
    int next = first + 1;
    while (next < parts && part_of(whole, next, parts).count == size) ++next;
    text += first > 0 ? ", " : "";
    text += next - first > 1 ? detail::concat(next - first, " x ", size) : std::to_string(size);
    first = next;
  }
  return text;
}

std::string optimizer_text(const OptimizerConfig& o) {
  std::string text = detail::concat("optimizer: ", name_of(o.name), ", lr ", o.lr);
  if (o.name == OptimizerName::sgd) {
    text += detail::concat(", momentum ", o.momentum, o.nesterov ? " (nesterov)" : "");
  } else {
    text += detail::concat(", betas ", o.betas[0], " and ", o.betas[1], ", eps ", o.eps);
  }
  text += detail::concat(", weight decay ", o.weight_decay);
  return text + (o.clip_grad > 0 ? detail::concat(", gradients clipped to ", o.clip_grad) : ", no clipping");
}

std::string schedule_text(const Config& config) {
  const LrScheduleConfig& s = config.lr_schedule;
  std::string text = detail::concat("learning rate: ", name_of(s.style));
  if (s.warmup_steps > 0) text += detail::concat(", ", s.warmup_steps, " steps of warm-up");
  if (s.style != LrStyle::constant)
    text += detail::concat(", down to ", s.min_lr, " at step ", s.decay_steps);
  return text + detail::concat(", of ", config.training.steps, " steps");
}

}  // namespace

std::vector<std::string> model_lines(const Config& given) {
  Config config = given;
  if (config.training.recompute == Recompute::automatic) config.training.recompute = Recompute::none;
  const auto tp = static_cast<int>(config.parallel.tensor), pp = static_cast<int>(config.parallel.pipeline);
  const MeshShape mesh{.tp = tp, .pp = pp};
  const std::vector<std::vector<ModelPiece>> pieces = all_pieces_of(config);
  std::vector<std::string> lines;
  for (int stage = 0; stage < pp; ++stage) {
    for (int rank = 0; rank < tp; ++rank) {
      const auto alone = ProcessMesh::alone(mesh, rank_of(mesh, {.tp = rank, .pp = stage}));
      const auto model = make_model(config, *alone, pieces[static_cast<std::size_t>(stage)], {});
      std::int64_t count = 0;
      for (const Parameter* p : model->parameters()) count += p->shape().numel();
      lines.push_back(detail::concat(" > number of parameters on (tensor, pipeline) model parallel rank (",
                                     rank, ", ", stage, "): ", count));
    }
  }
  lines.push_back(detail::concat(" > vocabulary of ", config.model.vocab_size, " in ", tp,
                                 tp == 1 ? " part" : " parts", " (", parts_text(config.model.vocab_size, tp),
                                 "), nothing padded"));
  return lines;
}

std::vector<std::string> training_lines(const Config& config, int data_ranks) {
  const TrainingConfig& t = config.training;
  const std::int64_t micro_batches = t.global_batch_size / (t.micro_batch_size * data_ranks);
  std::string state = optimizer_text(config.optimizer);
  const std::int64_t context = config.parallel.context, replicas = data_ranks * context;
  if (replicas > 1) {
    const std::int64_t stage = config.parallel.zero_stage;
    const char* const what = stage > 2   ? "its state, gradients and weights"
                             : stage > 1 ? "its state and gradients"
                                         : "its state";
    const char* const ranks = context > 1 ? " data and context ranks" : " data ranks";
    state += stage > 0 ? detail::concat(", ", what, " divided among ",
                                        config.parallel.zero_group.value_or(replicas), ranks)
                       : detail::concat(", its state whole on each of ", replicas, ranks);
  }
  return {
      detail::concat(
          "number of micro-batches: ", micro_batches, " of ", t.micro_batch_size,
          t.micro_batch_size == 1 ? " sample" : " samples", " on each of ", data_ranks,
          data_ranks == 1 ? " data rank" : " data ranks",
          context > 1 ? detail::concat(", its positions shared by ", context, " context ranks") : ""),
      detail::concat("total batch: ", t.global_batch_size, " samples of ", lengths_text(config), " a step"),
      std::move(state), schedule_text(config)};
}

}  // namespace tessera
