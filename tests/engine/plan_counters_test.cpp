/// The plan, which is a dry run, against real runs: bytes sent by every rank along every axis, the peak of
/// its allocator; and piece by piece what tapes hold, to the byte.

#include <gtest/gtest.h>

#include "engine_support.hpp"
#include "layout_support.hpp"
#include "tessera/engine/plan.hpp"
#include "tessera/nn/models/decoder.hpp"
#include "tests/support/device.hpp"

namespace tessera {
namespace {

using test::NamedLayout;

/// Attention and MLP beside each other.
const Family kNeox{"gpt_neox"};

/// Sizes whose tensors all fill whole blocks of the allocator.
Config base(Family family) {
  Settings c;
  c.model = {.family = family,
             .num_layers = 4,
             .hidden_size = 64,
             .num_heads = 4,
             .num_kv_heads = family == Family::llama ? 2 : 0,
             .ffn_hidden_size = 128,
             .vocab_size = 251,
             .max_positions = 64};
  c.training.seq_length = 64;
  c.training.micro_batch_size = 4;
  c.training.global_batch_size = 48;
  c.device.threads = 1;
  return c;
}

Config config_of(const NamedLayout& c) { return test::with_overrides(base(c.family), c.overrides); }

class PlanCounters : public ::testing::TestWithParam<NamedLayout> {};

TEST_P(PlanCounters, BytesSentAreTheRunsOwn) {
  const Config config = config_of(GetParam());
  const Plan plan = make_plan(config, GetParam().ranks);
  const Batch whole = test::random_batch(48, 64, 3, 251);
  std::mutex mutex;
  test::run_local(GetParam().ranks, {.timeout_s = 60}, [&](std::shared_ptr<Communicator> world) {
    const int rank = world->rank();
    const auto engine = build_engine(config, true, world);
    const RankPlan& planned = plan.ranks[static_cast<std::size_t>(rank)];
    for (int step = 0; step < 2; ++step) {
      const StepReport report =
          engine->step(test::data_part(whole, engine->mesh().coordinates().dp, plan.mesh.dp, 4));
      const std::lock_guard lock(mutex);
      ASSERT_EQ(report.traffic.empty(), GetParam().ranks == 1);
      for (const AxisTraffic& axis : report.traffic) {
        EXPECT_EQ(static_cast<std::int64_t>(axis.bytes_sent), planned.bytes_sent(axis.axis))
            << "rank " << rank << ", axis " << axis.axis << ", step " << step;
      }
    }
    const std::lock_guard lock(mutex);
    EXPECT_EQ(static_cast<std::int64_t>(engine->params().persistent_bytes()),
              planned.persistent_bytes() - planned.memory_of("optimizer"))
        << "rank " << rank;
    const auto peak = static_cast<double>(engine->ctx().allocator->stats().peak_used_bytes);
    EXPECT_NEAR(static_cast<double>(planned.memory_bytes()) / peak, 1.0, 0.02) << "rank " << rank;
  });
}

const NamedLayout kCases[] = {
    {"tp2", Family::gpt2, {"parallel.tensor=2"}, 2},
    {"tp4_sp", Family::gpt2, {"parallel.tensor=4", "parallel.sequence=true"}, 4},
    {"tp2_chunks", Family::gpt2, {"parallel.tensor=2", "parallel.tensor_chunks=3"}, 2},
    {"tp4_sp_chunks",
     Family::gpt2,
     {"parallel.tensor=4", "parallel.sequence=true", "parallel.tensor_chunks=2"},
     4},
    {"tp2_sp_dp3", Family::llama, {"parallel.tensor=2", "parallel.sequence=true"}, 6},
    {"tp4_copies_dp2", Family::llama, {"parallel.tensor=4", "parallel.sequence=true"}, 8},
    {"tp4_one_kv_head", Family::llama, {"parallel.tensor=4", "model.num_kv_heads=1"}, 4},
    {"dp3_zero0", Family::gpt2, {"parallel.zero_stage=0"}, 3},
    {"dp4_bf16", Family::gpt2, {"training.precision=bf16"}, 4},
    {"dp4_fp16", Family::gpt2, {"training.precision=fp16"}, 4},
    {"tp2_bf16_split",
     Family::llama,
     {"parallel.tensor=2", "training.precision=bf16", "optimizer.split_main_weights=true"},
     2},
    {"tp2_bf16_split_dp2",
     Family::llama,
     {"parallel.tensor=2", "training.precision=bf16", "optimizer.split_main_weights=true"},
     4},
    {"tp2_bf16_dp2", Family::llama, {"parallel.tensor=2", "training.precision=bf16"}, 4},
    {"tp2_sp_bf16_residual",
     Family::gpt2,
     {"parallel.tensor=2", "parallel.sequence=true", "training.precision=bf16",
      "training.fp32_residual=false"},
     2},
    {"pp2_tied", Family::gpt2, {"parallel.pipeline=2"}, 4},
    {"pp2_tp2_sp_tied",
     Family::gpt2,
     {"parallel.pipeline=2", "parallel.tensor=2", "parallel.sequence=true"},
     8},
    {"pp2_interleaved",
     Family::llama,
     {"parallel.pipeline=2", "parallel.schedule=interleaved", "parallel.virtual_stages=2"},
     2},
    {"pp3_gpipe_uneven",
     Family::llama,
     {"parallel.pipeline=3", "parallel.schedule=gpipe", "parallel.pipeline_layout=\"2,1,1\""},
     3},
    {"pp2_zb_h1_tp2",
     Family::gpt2,
     {"parallel.pipeline=2", "parallel.schedule=zb-h1", "parallel.tensor=2", "parallel.sequence=true"},
     4},
    {"pp2_zb_v", Family::gpt2, {"parallel.pipeline=2", "parallel.schedule=zb-v"}, 2},
    {"full_recompute",
     Family::gpt2,
     {"parallel.tensor=2", "parallel.sequence=true", "training.recompute=full",
      "training.recompute_layers=3"},
     2},
    {"full_block_partition",
     Family::gpt2,
     {"parallel.tensor=2", "training.recompute=full", "training.recompute_layers=2",
      "training.recompute_method=block", "training.recompute_partition=true"},
     2},
    {"selective",
     Family::llama,
     {"parallel.tensor=2", "parallel.sequence=true", "training.recompute=selective"},
     2},
    {"one_rank", Family::gpt2, {}, 1},
    {"mistral_dp2", Family::llama, {"model.sliding_window=64"}, 2},
    {"qwen2_tp2", Family::llama, {"parallel.tensor=2", "model.qkv_bias=true"}, 2},
    {"gpt_neox_tp2_sp", kNeox, {"parallel.tensor=2", "parallel.sequence=true"}, 2},
    {"gpt_neox_pp2_bf16", kNeox, {"parallel.pipeline=2", "training.precision=bf16"}, 2},
    {"sgd_dp2", Family::gpt2, {"optimizer.name=sgd"}, 2},
    {"dp2_offload",
     Family::gpt2,
     {"offload.optimizer=nvme", "offload.path=/tmp", "offload.tile=1024", "offload.buffers=3"},
     2},
    {"dp2_zero2", Family::gpt2, {"parallel.zero_stage=2"}, 2},
    {"cp2", Family::gpt2, {"parallel.context=2"}, 2},
    {"cp2_tp2_sp_dp2",
     Family::llama,
     {"parallel.context=2", "parallel.tensor=2", "parallel.sequence=true"},
     8},
    {"cp2_bf16", Family::llama, {"parallel.context=2", "training.precision=bf16"}, 2},
    {"cp2_pp2_zero2",
     Family::llama,
     {"parallel.context=2", "parallel.pipeline=2", "parallel.zero_stage=2"},
     4},
    {"cp2_dp2_zero3", Family::gpt2, {"parallel.context=2", "parallel.zero_stage=3"}, 4},
    {"cp4_selective", Family::llama, {"parallel.context=4", "training.recompute=selective"}, 4},
    {"dp4_zero2_bf16", Family::llama, {"parallel.zero_stage=2", "training.precision=bf16"}, 4},
    {"pp2_dp2_zero2", Family::gpt2, {"parallel.zero_stage=2", "parallel.pipeline=2"}, 4},
    {"tp2_sp_pp2_zbv_dp2_zero2",
     Family::llama,
     {"parallel.zero_stage=2", "parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2",
      "parallel.schedule=zb-v"},
     8},
    {"dp2_zero3", Family::gpt2, {"parallel.zero_stage=3"}, 2},
    {"dp4_zero3_bf16", Family::llama, {"parallel.zero_stage=3", "training.precision=bf16"}, 4},
    {"dp2_zero3_never", Family::llama, {"parallel.zero_stage=3", "parallel.zero_reshard=never"}, 2},
    {"dp2_zero3_split",
     Family::gpt2,
     {"parallel.zero_stage=3", "training.precision=bf16", "optimizer.split_main_weights=true"},
     2},
    {"tp2_sp_dp2_zero3_full",
     Family::gpt2,
     {"parallel.zero_stage=3", "parallel.tensor=2", "parallel.sequence=true", "training.recompute=full",
      "training.recompute_layers=2"},
     4},
    {"pp2_dp2_zero3", Family::gpt2, {"parallel.zero_stage=3", "parallel.pipeline=2"}, 4},
    {"pp2_dp2_zero3_always",
     Family::llama,
     {"parallel.zero_stage=3", "parallel.pipeline=2", "parallel.zero_reshard=always"},
     4},
    {"pp2_interleaved_dp2_zero3",
     Family::llama,
     {"parallel.zero_stage=3", "parallel.pipeline=2", "parallel.schedule=interleaved",
      "parallel.virtual_stages=2"},
     4},
    {"pp2_zb_h1_dp2_zero3_selective",
     Family::llama,
     {"parallel.zero_stage=3", "parallel.pipeline=2", "parallel.schedule=zb-h1",
      "training.recompute=selective"},
     4},
    {"dp4_zero3_group2", Family::gpt2, {"parallel.zero_stage=3", "parallel.zero_group=2"}, 4},
    {"pp2_dp4_zero2_group2",
     Family::llama,
     {"parallel.zero_stage=2", "parallel.zero_group=2", "parallel.pipeline=2"},
     8},
    {"dp2_zero1_bf16_gradients", Family::gpt2, {"parallel.gradient_dtype=bf16"}, 2},
    {"dp4_zero3_group2_bf16_gradients",
     Family::llama,
     {"parallel.gradient_dtype=bf16", "parallel.zero_stage=3", "parallel.zero_group=2"},
     4},
    {"dp4_zero1_group2", Family::gpt2, {"parallel.zero_group=2"}, 4},
    // Every token goes to every expert: rows are spread as evenly as a plan takes them to be.
    {"experts", Family::llama, {"model.num_experts=4", "model.router_topk=4"}, 1},
    {"dp4_ep2",
     Family::llama,
     {"parallel.expert=2", "model.num_experts=4", "model.router_topk=4", "model.router_aux_loss=0.1"},
     4},
    {"dp2_ep2_bf16_zero0",
     Family::llama,
     {"parallel.expert=2", "model.num_experts=4", "model.router_topk=4", "parallel.zero_stage=0",
      "training.precision=bf16"},
     2},
    {"dp4_ep2_zero3",
     Family::llama,
     {"parallel.expert=2", "model.num_experts=4", "model.router_topk=4", "parallel.zero_stage=3",
      "model.moe_layers=DE"},
     4},
    {"cp2_tp2_sp_ep2_full",
     Family::llama,
     {"parallel.expert=2", "model.num_experts=4", "model.router_topk=4", "parallel.context=2",
      "parallel.tensor=2", "parallel.sequence=true", "training.recompute=full"},
     4},
    {"pp2_zb_h1_ep2_zero2",
     Family::llama,
     {"parallel.expert=2", "model.num_experts=4", "model.router_topk=4", "parallel.pipeline=2",
      "parallel.schedule=zb-h1", "parallel.zero_stage=2"},
     4},
    {"dropout_pp2", Family::gpt2, {"parallel.pipeline=2", "model.dropout=0.1"}, 2},
};
INSTANTIATE_TEST_SUITE_P(Layouts, PlanCounters, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return std::string(info.param.name); });

/// A piece of a model at work on a real device and on meta.
class DryPieces : public ::testing::TestWithParam<NamedLayout> {};

/// Bytes of a rank's allocator.
struct Held {
  std::int64_t store = 0, forward = 0, backward = 0, end = 0, peak = 0;
  friend bool operator==(const Held&, const Held&) = default;
  friend std::ostream& operator<<(std::ostream& out, const Held& h) {
    return out << "store " << h.store << ", after forward " << h.forward << ", after backward " << h.backward
               << ", at the end " << h.end << ", at most " << h.peak;
  }
};

std::int64_t used(const ExecCtx& ctx) {
  ctx.stream->synchronize();
  return static_cast<std::int64_t>(ctx.allocator->stats().used_bytes);
}

/// Two micro-batches, of which the second is measured: weight gradients apart from those of inputs.
Held run_piece(const ExecCtx& ctx, const Config& config, const ModelPiece& piece, Communicator& tensor) {
  Decoder model(config.model, numerics_of(config.training),
                {.tensor = {&tensor, config.parallel.sequence},
                 .pieces = {piece},
                 .recompute = RecomputeOptions::from(config.training)});
  ParamStore store(
      ctx, model.parameters(),
      {.compute = numerics_of(config.training).compute,
       .groups = {.tensor = &tensor, .world = &tensor, .tensor_block = [&](int) -> Communicator& {
                    return tensor;
                  }}});
  const MicroBatch input = to_micro_batch(ctx, test::random_batch(4, 64, 5, 251));
  const auto activation = [&] {
    const std::vector<Port> ports = piece.embedding ? model.outputs(0, {4, 64}) : model.inputs(0, {4, 64});
    Tensor x = Tensor::empty(ctx, ports.at(0).shape, ports.at(0).dtype);
    ops::fill_zero(ctx, x);
    return x;
  };
  Held held{.store = used(ctx)};
  for (int turn = 0; turn < 2; ++turn) {
    ctx.allocator->reset_peak();
    Tape tape;
    const Forward forward{.exec = ctx, .input = input, .tape = &tape, .training = true};
    std::vector<Var> first;
    if (!piece.embedding) first.push_back(tape.input(activation(), true));
    Tensor upstream;
    if (piece.head) {
      upstream = Tensor::empty(ctx, {256}, DType::f32);
      ops::fill_constant(ctx, upstream, 1.0f);
    }
    Var output = std::move(model.run_piece(forward, 0, first, Model::Output::losses, upstream).at(0));
    if (!piece.head) output.take();
    if (!piece.embedding) first[0].take();
    tensor.barrier(ctx);  // the head's input gradient may still be on its way
    held.forward = used(ctx);
    Tensor grad = piece.head ? upstream : activation();
    tape.backward(ctx, output, std::move(grad), Tape::WeightGradients::deferred);
    if (!piece.embedding) tape.take_grad(first[0]);
    first.clear();
    output = Var();
    held.backward = used(ctx);
    tape.run_weight_gradients(ctx);
    held.peak = static_cast<std::int64_t>(ctx.allocator->stats().peak_used_bytes);
  }
  held.end = used(ctx);
  return held;
}

TEST_P(DryPieces, HoldWhatRealOnesHold) {
  const Config config = config_of(GetParam());
  const int ranks = GetParam().ranks;
  for (const ModelPiece& piece : {ModelPiece{0, 3, true, false}, ModelPiece{1, 2, false, false},
                                  ModelPiece{1, 3, false, true}, ModelPiece{0, 4, true, true}}) {
    SCOPED_TRACE(piece.head ? piece.embedding ? "whole" : "last" : piece.embedding ? "first" : "middle");
    test::run_local(ranks, {.timeout_s = 60}, [&](std::shared_ptr<Communicator> tensor) {
      const Held real = run_piece(ExecCtx::cpu(1, 7), config, piece, *tensor);
      const auto absent =
          ranks == 1 ? make_self_communicator("tp") : make_absent_communicator(tensor->rank(), ranks, "tp");
      EXPECT_EQ(run_piece(ExecCtx::meta(7), config, piece, *absent), real);
      EXPECT_EQ(absent->stats().bytes_sent, tensor->stats().bytes_sent);
    });
  }
}

const NamedLayout kTapes[] = {
    {"gpt2", Family::gpt2, {}, 1},
    {"llama", Family::llama, {}, 1},
    {"gpt2_bf16", Family::gpt2, {"training.precision=bf16"}, 1},
    {"gpt2_fp16", Family::gpt2, {"training.precision=fp16"}, 1},
    {"llama_bf16_residual", Family::llama, {"training.precision=bf16", "training.fp32_residual=false"}, 1},
    {"selective", Family::gpt2, {"training.recompute=selective"}, 1},
    {"full", Family::llama, {"training.recompute=full", "training.recompute_layers=2"}, 1},
    {"block",
     Family::gpt2,
     {"training.recompute=full", "training.recompute_layers=2", "training.recompute_method=block"},
     1},
    {"gpt_neox", kNeox, {}, 1},
    {"gpt2_dropout", Family::gpt2, {"model.dropout=0.1", "model.attention_dropout=0.1"}, 1},
    {"tp2", Family::gpt2, {"parallel.tensor=2"}, 2},
    {"tp2_sp", Family::llama, {"parallel.tensor=2", "parallel.sequence=true"}, 2},
    {"tp2_sp_bf16_selective",
     Family::gpt2,
     {"parallel.tensor=2", "parallel.sequence=true", "training.precision=bf16",
      "training.recompute=selective"},
     2},
    {"tp4_copies", Family::llama, {"parallel.tensor=4", "parallel.sequence=true"}, 4},
    {"tp2_partition",
     Family::gpt2,
     {"parallel.tensor=2", "training.recompute=full", "training.recompute_partition=true"},
     2},
};
INSTANTIATE_TEST_SUITE_P(Tapes, DryPieces, ::testing::ValuesIn(kTapes),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace tessera
