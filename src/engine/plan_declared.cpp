#include "engine/plan_declared.hpp"

#include <map>

#include "engine/plan_activations.hpp"
#include "optim/runs.hpp"
#include "tessera/engine/build.hpp"

namespace tessera::detail {
namespace {

std::unique_ptr<Decoder> declare(const Config& config, const PaperGroup& tensor, int stage, int rank) {
  const TensorParallel place{tensor[static_cast<std::size_t>(rank)].get(), config.parallel.sequence};
  return std::make_unique<Decoder>(
      config.model, numerics_of(config.training),
      Sharding{place, pieces_of(config, stage), RecomputeOptions::from(config.training)});
}

std::int64_t moments_of(const OptimizerConfig& optimizer) {
  if (optimizer.name != OptimizerName::sgd) return 2;
  return optimizer.momentum > 0 ? 1 : 0;
}

std::int64_t bytes_of(const std::vector<Port>& ports) {
  std::int64_t sum = 0;
  for (const Port& port : ports) sum += port.bytes();
  return sum;
}

void add(std::vector<TrafficTerm>& terms, std::string_view axis, std::string_view name, std::int64_t bytes) {
  if (bytes > 0) terms.push_back({axis, name, bytes});
}

}  // namespace

PaperGroup make_paper_group(int size) {
  if (size == 1) return {make_self_communicator("tp")};
  return make_local_communicators(size, "tp");
}

DeclaredRank::DeclaredRank(const Config& config, const MeshShape& mesh, const PaperGroup& tensor, int stage,
                           int tensor_rank)
    : mesh_(mesh),
      micro_batch_{config.training.micro_batch_size, config.training.seq_length},
      stage_(stage),
      tensor_rank_(tensor_rank),
      zero_stage_(static_cast<int>(config.parallel.zero_stage)),
      has_copy_(numerics_of(config.training).compute != DType::f32),
      split_(config.optimizer.split_main_weights),
      moments_(moments_of(config.optimizer)),
      model_(declare(config, tensor, stage, tensor_rank)) {
  const std::vector<Parameter*> parameters = model_->parameters();
  for (const Parameter* p : parameters) parameters_ += p->shape().numel();
  // Where parts differ in size the first tensor rank has the largest, and all set aside as much.
  std::vector<std::int64_t> capacities;
  if (mesh.tp > 1) {
    const auto first = declare(config, tensor, stage, 0);
    for (const Parameter* p : first->parameters()) capacities.push_back(p->shape().numel());
  }
  layout_ = FlatLayout(parameters, {.data_ranks = mesh.dp, .bucket_elements = 0, .capacities = capacities});
}

std::int64_t DeclaredRank::input_bytes(int chunk) const {
  return bytes_of(model_->inputs(chunk, micro_batch_));
}

std::int64_t DeclaredRank::output_bytes(int chunk) const {
  return bytes_of(model_->outputs(chunk, micro_batch_));
}

void DeclaredRank::add_memory(std::vector<MemoryTerm>& terms) const {
  std::int64_t main = 0, state = 0;
  for (const Bucket& bucket : layout_.buckets()) {
    const std::int64_t own = updated(bucket, 0).count;
    state += own;
    main += (splits_main(bucket) ? 2 : 4) * (main_is_whole(bucket) ? bucket.count : own);
  }
  terms.push_back({"weights", main});
  if (has_copy_) terms.push_back({"16-bit weights", 2 * layout_.numel()});
  terms.push_back({"gradients", 4 * layout_.numel()});
  terms.push_back({"optimizer", 4 * moments_ * state});
}

void DeclaredRank::add_data_traffic(std::vector<TrafficTerm>& terms) const {
  const Collective data{0, mesh_.dp};  // buckets divide evenly: every data rank sends alike
  std::int64_t gradients = 0, weights = 0;
  for (const Bucket& bucket : layout_.buckets()) {
    if (sharded()) {
      gradients += data.part(bucket.count, 4);
      weights += data.part(bucket.count, main_is_whole(bucket) ? 4 : 2);
    } else {
      gradients += data.all_reduce(bucket.count, 4);
    }
  }
  add(terms, "dp", sharded() ? "gradients, reduce-scatter" : "gradients, all-reduce", gradients);
  add(terms, "dp", "weights, all-gather", weights);
}

void DeclaredRank::add_traffic(int data_rank, std::vector<TrafficTerm>& terms) const {
  if (mesh_.dp > 1) add_data_traffic(terms);
  // Sums of what several ranks have a part of: of the elements this rank updates.
  std::int64_t partial = 0, tied = 0;
  std::map<int, std::int64_t> copied;
  for (const ParamSlot& slot : layout_.slots()) {
    const Range own = updated(layout_.buckets()[slot.bucket], data_rank);
    const ParameterTraits& traits = slot.parameter->traits();
    if (traits.partial_over_tensor) partial += overlap(slot.run(), own).count;
    if (traits.tied) tied += overlap(slot.run(), own).count;
    for (const Segment& segment : slot.parameter->placement().segments()) {
      if (segment.copies == 1) continue;
      for (const Range& run : runs_of(slot.parameter->placement(), segment))
        copied[segment.copies] += overlap({slot.offset + run.begin, run.count}, own).count;
    }
  }
  const Collective tensor{tensor_rank_, mesh_.tp};
  if (mesh_.tp > 1) add(terms, "tp", "gradients of norms and positions", tensor.all_reduce(partial, 4));
  for (const auto& [copies, elements] : copied) {
    const Collective block{tensor_rank_ % copies, copies};
    add(terms, copies == mesh_.tp ? "tp" : "tp_block", "gradients of shared key-value heads",
        block.all_reduce(elements, 4));
  }
  if (mesh_.pp > 1)
    add(terms, "embedding", "gradients of the tied table",
        Collective{stage_ == 0 ? 0 : 1, 2}.all_reduce(tied, 4));
}

}  // namespace tessera::detail
