/// The rules of layouts, and the data-parallel degree from the number of processes.

#include <algorithm>
#include <limits>

#include "config_test_support.hpp"

namespace tessera {
namespace {

constexpr const char* kModel =
    "model: {family: llama, num_layers: 8, hidden_size: 96, num_heads: 12, num_kv_heads: 4, ffn_hidden_size: "
    "240, "
    "vocab_size: 211, max_positions: 128}\n";
constexpr const char* kTraining = "training: {seq_length: 96, micro_batch_size: 2, global_batch_size: 24}\n";

std::string text_of(const std::string& parallel) {
  return std::string(kModel) + kTraining + "parallel: {" + parallel + "}\n";
}

std::string fault(const std::string& parallel, const std::vector<std::string>& overrides = {}) {
  return refusal(text_of(parallel), overrides);
}

Config sound(const std::string& parallel, const std::vector<std::string>& overrides = {}) {
  return parse_config(text_of(parallel), "t.yaml", overrides);
}

std::string layout_fault(const std::string& parallel, std::optional<std::int64_t> processes) {
  try {
    resolve_layout(sound(parallel), processes);
    return {};
  } catch (const ConfigError& error) {
    return error.what();
  }
}

TEST(Layouts, AcceptedOnes) {
  for (const char* parallel :
       {"tensor: 4, sequence: true", "tensor: 12", "tensor: 2, pipeline: 8", "pipeline: 3, data: 4",
        "pipeline: 4, virtual_stages: 2, schedule: interleaved, data: 1",
        "pipeline: 2, virtual_stages: 4, schedule: interleaved, data: 3", "pipeline: 4, schedule: zb-v",
        "pipeline: 4, schedule: zb-v, virtual_stages: 2", "schedule: zb-v", "pipeline: 8, schedule: zb-h1",
        "pipeline: 4, schedule: gpipe, pipeline_layout: \"0,4,4,0\"",
        "pipeline: 2, schedule: zb-v, pipeline_layout: \" 1 , 3, 3,1\"", "zero_stage: 0, data: 12"}) {
    EXPECT_EQ(fault(parallel), "") << parallel;
  }
}

TEST(Layouts, SplitRank) {
  const auto of_t5 = [](const std::string& parallel) {
    return refusal("model: {family: t5, num_layers: 8, encoder_layers: 2, num_heads: 4, hidden_size: 32}\n" +
                   std::string(kTraining) + "parallel: {" + parallel + "}\n");
  };
  for (const char* parallel : {"pipeline: 4, pipeline_split_rank: 1", "pipeline: 8, pipeline_split_rank: 2",
                               "pipeline: 4, pipeline_split_rank: 2, schedule: zb-h1"})
    EXPECT_EQ(of_t5(parallel), "") << parallel;
  expect_contains(of_t5("pipeline: 4, pipeline_split_rank: 4"),
                  "parallel.pipeline_split_rank (4) must be above 0 and below parallel.pipeline (4)");
  expect_contains(of_t5("pipeline: 4, pipeline_split_rank: 0"), "parallel.pipeline_split_rank");
  expect_contains(of_t5("pipeline: 4, pipeline_split_rank: 3"), "the encoder has 2, the decoder 6");
  expect_contains(of_t5("pipeline: 2, pipeline_split_rank: 1, pipeline_layout: \"2,6\""), "give one");
  expect_contains(of_t5("pipeline: 2, pipeline_split_rank: 1, schedule: interleaved, virtual_stages: 2"),
                  "with parallel.schedule interleaved a stage holds several pieces");
  expect_contains(
      fault("pipeline: 2, pipeline_split_rank: 1"),
      "parallel.pipeline_split_rank is for models with an encoder and a decoder; model.family llama");
}

TEST(Layouts, TensorDegree) {
  EXPECT_EQ(fault("tensor: 8"),
            "t.yaml:3:20: parallel.tensor (8) does not divide model.num_heads (12); use 1, 2, 3, 4, 6 or 12");
  expect_contains(
      fault("tensor: 4", {"model.ffn_hidden_size=242"}),
      "parallel.tensor (4) does not divide model.ffn_hidden_size (242); the next that fits is 244");
  expect_contains(fault("tensor: 4", {"model.vocab_size=3"}), "is more than model.vocab_size (3)");
  expect_contains(fault("tensor: 4, sequence: true", {"training.seq_length=94"}),
                  "training.seq_length (94) is not a multiple of parallel.tensor (4), which "
                  "parallel.sequence needs; use 96");
  EXPECT_EQ(fault("tensor: 4", {"training.seq_length=94"}), "");
}

TEST(Layouts, KeyValueHeads) {
  // 12 query heads over 4: tp 3 neither divides 4 nor is a multiple of it.
  expect_contains(
      fault("tensor: 3"),
      "parallel.tensor (3) and model.num_kv_heads (4): one must divide the other; use 1, 2, 4 or 12");
  EXPECT_EQ(fault("tensor: 12"), "");
  EXPECT_EQ(fault("tensor: 2", {"model.num_kv_heads=1"}), "");
  EXPECT_EQ(fault("tensor: 3", {"model.num_kv_heads=0"}), "");
}

TEST(Layouts, ChunksBelongToTheSchedule) {
  for (const char* schedule : {"gpipe", "1f1b", "zb-h1"}) {
    expect_contains(
        fault(std::string("pipeline: 2, virtual_stages: 2, schedule: ") + schedule),
        std::string("schedule ") + schedule + " has one model chunk per stage; use schedule interleaved");
  }
  expect_contains(fault("pipeline: 2, schedule: interleaved"),
                  "parallel.virtual_stages must be at least 2 for schedule interleaved, not 1");
  expect_contains(fault("pipeline: 2, virtual_stages: 3, schedule: zb-v"),
                  "parallel.virtual_stages is 3, but schedule zb-v has 2 always");
  expect_contains(fault("virtual_stages: 2, schedule: interleaved"),
                  "parallel.schedule interleaved needs parallel.pipeline above 1; use 1f1b");
  EXPECT_EQ(sound("pipeline: 2, schedule: zb-v").parallel.virtual_stages, 2);
}

TEST(Layouts, PiecesAndLayers) {
  expect_contains(fault("pipeline: 3, virtual_stages: 3, schedule: interleaved"),
                  "model.num_layers (8) is less than the 9 pieces of the pipeline (pipeline 3 x 3 chunks)");
  expect_contains(fault("pipeline: 5, schedule: zb-v"), "less than the 10 pieces");
  expect_contains(fault("pipeline: 2, pipeline_layout: \"4,3,1\""),
                  "parallel.pipeline_layout has 3 numbers, but there are 2 pieces (pipeline 2 x 1 chunks)");
  expect_contains(fault("pipeline: 2, pipeline_layout: \"4,3\""),
                  "parallel.pipeline_layout adds up to 7 layers, but model.num_layers is 8");
  expect_contains(fault("pipeline: 4, pipeline_layout: \"4,0,2,2\""), "leaves piece 2 without a layer");
  for (const char* layout : {"4;4", "4,,4", "4,4,", "-4,12", "4,x", "4.0,4", "1000000,4", "+4,4", "4 4"}) {
    expect_contains(fault(std::string("pipeline: 2, pipeline_layout: \"") + layout + "\""),
                    "must be layers per piece such as \"3,4,4,1\"");
  }
  EXPECT_EQ(layers_per_piece("3,4,4,1"), (std::vector<std::int64_t>{3, 4, 4, 1}));
}

TEST(Layouts, Batches) {
  expect_contains(fault("data: 5"),
                  "training.global_batch_size (24) is not a multiple of training.micro_batch_size x "
                  "parallel.data (2 x 5 = 10)");
  expect_contains(fault("pipeline: 4, virtual_stages: 2, schedule: interleaved, data: 2"),
                  "needs micro-batches in groups of parallel.pipeline (4), but there are 6");
  EXPECT_EQ(fault("pipeline: 4, schedule: 1f1b, data: 4"), "");
}

TEST(Layouts, Recompute) {
  EXPECT_EQ(fault("", {"training.recompute=full", "training.recompute_layers=8"}), "");
  expect_contains(fault("", {"training.recompute=full", "training.recompute_layers=9"}),
                  "training.recompute_layers (9) is more than model.num_layers (8)");
  EXPECT_EQ(fault("tensor: 2", {"training.recompute=full", "training.recompute_partition=true"}), "");
  expect_contains(fault("tensor: 2", {"training.recompute=selective", "training.recompute_partition=true"}),
                  "training.recompute_partition needs training.recompute full, not selective");
  expect_contains(fault("", {"training.recompute=full", "training.recompute_partition=true"}),
                  "training.recompute_partition needs parallel.tensor above 1");
  expect_contains(
      fault("tensor: 2, sequence: true", {"training.recompute=full", "training.recompute_partition=true"}),
      "training.recompute_partition has nothing to do under parallel.sequence");
  EXPECT_EQ(fault("tensor: 2", {"training.recompute=auto"}), "");
  expect_contains(fault("", {"training.recompute=auto", "training.recompute_layers=2"}),
                  "training.recompute_layers (2) is for training.recompute auto to find; leave it out");
  expect_contains(fault("", {"training.recompute=auto", "training.recompute_method=block"}),
                  "training.recompute_method (block) is for training.recompute auto to find; leave it out");
  expect_contains(fault("tensor: 2", {"training.recompute=auto", "training.recompute_partition=true"}),
                  "training.recompute_partition needs training.recompute full, not auto");
}

TEST(SplitMainWeights, AreForBf16Alone) {
  const auto with_precision = [](const char* precision) {
    return fault("", {"optimizer.split_main_weights=true", std::string("training.precision=") + precision});
  };
  EXPECT_EQ(with_precision("bf16"), "");
  expect_contains(with_precision("fp16"),
                  "optimizer.split_main_weights needs training.precision bf16, not fp16");
  expect_contains(with_precision("fp32"), "leave it out or train in bf16");
  const Config config = sound("", {"optimizer.split_main_weights=true", "training.precision=bf16"});
  EXPECT_TRUE(config.optimizer.split_main_weights);
  EXPECT_TRUE(parse_config(to_yaml(config), "printed").optimizer.split_main_weights);
}

TEST(Layouts, SharesOfDataRanks) {
  for (const char* sound : {"data: 6, zero_group: 3", "data: 6, zero_stage: 3, zero_group: 6",
                            "zero_group: 5", "data: 2, zero_stage: 3, zero_reshard: never"})
    EXPECT_EQ(fault(sound), "") << sound;
  expect_contains(fault("data: 6, zero_group: 4"),
                  "parallel.data (6) is not a multiple of parallel.zero_group (4)");
  expect_contains(fault("data: 6, zero_stage: 0, zero_group: 3"),
                  "parallel.zero_group needs parallel.zero_stage above 0");
  expect_contains(layout_fault("zero_group: 4", 6), "is not a multiple of parallel.zero_group (4)");
  expect_contains(fault("data: 2, zero_stage: 2", {"device.cuda_graph=true"}),
                  "needs parallel.zero_stage 0 or 1");
}

TEST(Layouts, ContextRanks) {
  for (const char* sound : {"context: 2", "context: 48", "context: 4, tensor: 4, sequence: true",
                            "context: 2, data: 3, zero_group: 6"})
    EXPECT_EQ(fault(sound), "") << sound;
  expect_contains(fault("context: 5"),
                  "training.seq_length (96) is not a multiple of 10, which "
                  "parallel.context (5) needs: two chunks for each rank; use 100");
  expect_contains(fault("context: 4, tensor: 4, sequence: true", {"training.seq_length=40"}),
                  "is not a multiple of 16, which parallel.context (4) needs beside parallel.sequence");
  expect_contains(fault("context: 2, data: 3, zero_group: 4"),
                  "parallel.data x context (6) is not a multiple of parallel.zero_group (4)");
  EXPECT_EQ(fault("context: 3, context_method: ulysses", {"model.num_heads=12", "model.num_kv_heads=3"}), "");
  expect_contains(
      fault("context: 2, tensor: 2, context_method: ulysses", {"model.num_heads=12", "model.num_kv_heads=6"}),
      "parallel.context (2) does not divide the 3 key-value heads of a tensor rank; use all_gather "
      "or auto, or a context of 1 or 3");
  expect_contains(fault("context: 2, context_method: ring"), "use auto, all_gather or ulysses");
  expect_contains(fault("context: 2", {"model.family=bert", "model.num_kv_heads=0"}),
                  "model.family bert computes whole samples only");
  expect_contains(layout_fault("context: 2, tensor: 2", 6),
                  "parallel.tensor 2 x pipeline 1 x context 2 = 4 ranks");
}

TEST(Layouts, AllAtOnce) {
  const std::string message = fault(
      "tensor: 5, sequence: true, pipeline: 3, virtual_stages: 3, schedule: interleaved, data: 5, "
      "zero_stage: 4, context: 2",
      {"training.recompute=selective", "training.recompute_partition=true"});
  for (const char* part : {"model.num_heads (12)", "model.num_kv_heads (4)", "training.seq_length (96)",
                           "less than the 9 pieces", "(2 x 5 = 10)", "zero_stage must be at most 3",
                           "recompute_partition needs"}) {
    expect_contains(message, part);
  }
  EXPECT_EQ(message.find("ffn_hidden_size"), std::string::npos) << "240 is a multiple of 5";
  EXPECT_EQ(std::count(message.begin(), message.end(), '\n'), 6) << message;
}

// No degree, however wrong, is divided by.
TEST(Layouts, ZeroAndHugeDegrees) {
  for (const std::int64_t wrong :
       {std::int64_t{0}, std::int64_t{-1}, std::int64_t{1} << 62, std::numeric_limits<std::int64_t>::min()}) {
    for (const auto member : {&ParallelConfig::tensor, &ParallelConfig::pipeline,
                              &ParallelConfig::virtual_stages, &ParallelConfig::context}) {
      Config config = sound("pipeline: 2, data: 3");
      config.parallel.*member = wrong;
      EXPECT_THROW(validate(config), ConfigError);
      EXPECT_THROW(resolve_layout(config, 6), ConfigError);
      EXPECT_THROW(resolve_layout(config, std::nullopt), ConfigError);
    }
    for (const auto member : {&TrainingConfig::micro_batch_size, &TrainingConfig::global_batch_size,
                              &TrainingConfig::seq_length, &TrainingConfig::recompute_layers}) {
      Config config = sound("pipeline: 2, data: 3");
      config.training.*member = wrong;
      EXPECT_THROW(resolve_layout(config, 6), ConfigError);
    }
    Config config = sound("tensor: 2");
    config.parallel.data = wrong;
    EXPECT_THROW(resolve_layout(config, std::nullopt), ConfigError);
    EXPECT_THROW(resolve_layout(config, 4), ConfigError);
  }
}

TEST(ResolveLayout, DataIsWhatIsLeft) {
  EXPECT_EQ(resolve_layout(sound("tensor: 2, pipeline: 2"), 12).data, 3);
  EXPECT_EQ(resolve_layout(sound("tensor: 2, pipeline: 2"), std::nullopt).data, 1);
  EXPECT_EQ(resolve_layout(sound("tensor: 2, data: 3"), 6).data, 3);
  EXPECT_EQ(resolve_layout(sound("tensor: 2, data: 3"), std::nullopt).data, 3);
  EXPECT_EQ(resolve_layout(Settings{}, 1).data, 1);
  EXPECT_EQ(processes_needed(sound("tensor: 2, pipeline: 2")), 4);
  EXPECT_EQ(processes_needed(sound("tensor: 2, pipeline: 2, data: 3")), 12);
}

TEST(ResolveLayout, SaysWhatDoesNotFit) {
  EXPECT_EQ(layout_fault("tensor: 2, pipeline: 2, data: 3", 8),
            "parallel.tensor 2 x pipeline 2 x data 3 = 12 ranks, but there are 8 processes: parallel.data "
            "would have to be 2 (or null: what is left)");
  EXPECT_EQ(
      layout_fault("tensor: 4, pipeline: 2", 12),
      "parallel.tensor 4 x pipeline 2 = 8 ranks hold one copy of the model, but there are 12 processes, "
      "not a multiple of it: no value of parallel.data fits; start 8 or 16");
  expect_contains(layout_fault("tensor: 4, pipeline: 2", 4), "start 8");
  EXPECT_NE(layout_fault("tensor: 4", 0), "");
  EXPECT_NE(layout_fault("", -3), "");
}

TEST(ResolveLayout, ChecksWhatNeedsTheDegree) {
  expect_contains(layout_fault("", 5), "(2 x 5 = 10)");
  expect_contains(layout_fault("pipeline: 4, virtual_stages: 2, schedule: interleaved", 8),
                  "but there are 6");
  EXPECT_EQ(layout_fault("pipeline: 4, virtual_stages: 2, schedule: interleaved", 4), "");
  expect_contains(layout_fault("", std::int64_t{1} << 40), "parallel.data must be at most 1000000");
  expect_contains(layout_fault("tensor: 2", 400000),
                  "parallel.tensor 2 x pipeline 1 x data 200000 are 400000 ranks");
  Config config = sound("tensor: 2");
  config.model.num_heads = 7;
  config.model.head_dim = 8;
  config.model.num_kv_heads = 7;
  try {
    resolve_layout(config, 3);
    FAIL();
  } catch (const ConfigError& error) {
    expect_contains(error.what(), "does not divide model.num_heads (7)");
    expect_contains(error.what(), "but there are 3 processes");
  }
}

}  // namespace
}  // namespace tessera
