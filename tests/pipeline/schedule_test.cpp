#include <gtest/gtest.h>

#include <sstream>

#include "support.hpp"
#include "tessera/base/error.hpp"

namespace tessera::test {
namespace {

/// A column in Megatron's way of writing: +c for a forward of chunk c, -c for a backward, from 1.
std::string megatron_list(const Schedule& schedule, int stage) {
  std::string text;
  for (const Action& action : schedule.actions[static_cast<std::size_t>(stage)]) {
    const int sign = action.kind == Kind::forward ? 1 : -1;
    if (!text.empty()) text += ' ';
    text += std::to_string(sign * (action.chunk + 1));
  }
  return text;
}

std::string column_text(const Schedule& schedule, int stage) {
  std::istringstream lines(to_text(schedule));
  std::string line;
  for (int k = 0; k <= stage; ++k) std::getline(lines, line);
  return line;
}

int forwards_before_first_backward(const std::vector<Action>& column) {
  int count = 0;
  while (column[static_cast<std::size_t>(count)].kind == Kind::forward) ++count;
  return count;
}

TEST(Schedule, InterleavedIsMegatrons) {
  const Schedule small = make_schedule(PipelineSchedule::interleaved, 2, 2, 4);
  EXPECT_EQ(megatron_list(small, 0), "1 1 2 2 1 -2 1 -2 2 -1 2 -1 -2 -2 -1 -1");
  EXPECT_EQ(megatron_list(small, 1), "1 1 2 -2 2 -2 1 -1 1 -1 2 -2 2 -2 -1 -1");
  EXPECT_EQ(column_text(small, 1), "F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a");

  const Schedule large = make_schedule(PipelineSchedule::interleaved, 4, 2, 8);
  EXPECT_EQ(megatron_list(large, 3),
            "1 1 1 1 2 -2 2 -2 2 -2 2 -2 1 -1 1 -1 1 -1 1 -1 2 -2 2 -2 2 -2 2 -2 -1 -1 -1 -1");
  const std::vector<int> warmups = {10, 8, 6, 4};
  for (std::size_t stage = 0; stage < 4; ++stage) {
    // The first steady step begins with a forward too.
    EXPECT_EQ(forwards_before_first_backward(large.actions[stage]), warmups[stage] + 1) << "stage " << stage;
  }
}

TEST(Schedule, OneForwardOneBackwardIsMegatrons) {
  const Schedule schedule = make_schedule(PipelineSchedule::one_f_one_b, 4, 1, 5);
  EXPECT_EQ(to_text(schedule),
            "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4\n"
            "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4\n"
            "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4\n"
            "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4\n");
  EXPECT_EQ(to_text(make_schedule(PipelineSchedule::one_f_one_b, 4, 1, 2)),
            "F0 F1 B0 B1\nF0 F1 B0 B1\nF0 F1 B0 B1\nF0 B0 F1 B1\n");
}

TEST(Schedule, GpipeRunsAllForwardsFirst) {
  EXPECT_EQ(to_text(make_schedule(PipelineSchedule::gpipe, 2, 1, 3)),
            "F0 F1 F2 B0 B1 B2\nF0 F1 F2 B0 B1 B2\n");
}

TEST(Schedule, ZeroBubbleOneDelaysWeightsByTheStage) {
  EXPECT_EQ(to_text(make_schedule(PipelineSchedule::zb_h1, 3, 1, 5)),
            "F0 F1 F2 B0 W0 F3 B1 W1 F4 B2 W2 B3 W3 B4 W4\n"
            "F0 F1 B0 F2 B1 W0 F3 B2 W1 F4 B3 W2 B4 W3 W4\n"
            "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 F4 B4 W2 W3 W4\n");
}

TEST(Schedule, ZeroBubbleVOfTwoStages) {
  EXPECT_EQ(
      to_text(make_schedule(PipelineSchedule::zb_v, 2, 2, 4)),
      "F0a F1a F2a F0b B0b W0b F1b B1b W1b F3a B0a W0a F2b B2b W2b B1a W1a F3b B3b W3b B2a W2a B3a W3a\n"
      "F0a F0b F1a F1b B0b W0b F2a B0a W0a F2b B1b W1b F3a B1a W1a F3b B2b W2b B2a B3b B3a W2a W3b W3a\n");
}

TEST(Schedule, OneStageAlternates) {
  EXPECT_EQ(to_text(make_schedule(PipelineSchedule::gpipe, 1, 1, 2)), "F0 B0 F1 B1\n");
  EXPECT_EQ(to_text(make_schedule(PipelineSchedule::one_f_one_b, 1, 1, 2)), "F0 B0 F1 B1\n");
  EXPECT_EQ(to_text(make_schedule(PipelineSchedule::zb_h1, 1, 1, 2)), "F0 B0 W0 F1 B1 W1\n");
  EXPECT_EQ(to_text(make_schedule(PipelineSchedule::zb_v, 1, 2, 1)), "F0a F0b B0b W0b B0a W0a\n");
  EXPECT_EQ(to_text(make_schedule(PipelineSchedule::interleaved, 1, 3, 1)), "F0a F0b F0c B0c B0b B0a\n");
}

TEST(Schedule, EvaluationRunsForwardsOnly) {
  EXPECT_EQ(to_text(make_schedule(PipelineSchedule::one_f_one_b, 2, 1, 3, true)), "F0 F1 F2\nF0 F1 F2\n");
  // A group of two, then the one that is left.
  EXPECT_EQ(to_text(make_schedule(PipelineSchedule::interleaved, 2, 2, 3, true)),
            "F0a F1a F0b F1b F2a F2b\nF0a F1a F0b F1b F2a F2b\n");
  EXPECT_EQ(to_text(make_schedule(PipelineSchedule::zb_v, 2, 2, 3, true)),
            "F0a F1a F0b F2a F1b F2b\nF0a F0b F1a F1b F2a F2b\n");
}

TEST(Schedule, PiecesGoRoundOrFold) {
  const Schedule round = make_schedule(PipelineSchedule::interleaved, 3, 2, 3);
  const Schedule folded = make_schedule(PipelineSchedule::zb_v, 3, 2, 3);
  const std::vector<int> round_stages = {0, 1, 2, 0, 1, 2}, folded_stages = {0, 1, 2, 2, 1, 0};
  for (int piece = 0; piece < 6; ++piece) {
    EXPECT_EQ(round.stage_of(piece), round_stages[static_cast<std::size_t>(piece)]);
    EXPECT_EQ(folded.stage_of(piece), folded_stages[static_cast<std::size_t>(piece)]);
    EXPECT_EQ(folded.chunk_of(piece), piece / 3);
    EXPECT_EQ(round.piece_of(round.stage_of(piece), round.chunk_of(piece)), piece);
    EXPECT_EQ(folded.piece_of(folded.stage_of(piece), folded.chunk_of(piece)), piece);
  }
  EXPECT_THROW(folded.stage_of(6), InvalidArgument);
  EXPECT_THROW(folded.piece_of(0, 2), InvalidArgument);
}

TEST(Schedule, ImpossibleNumbersAreRefused) {
  for (const PipelineSchedule kind : kSchedules) {
    EXPECT_THROW(make_schedule(kind, 0, 2, 4), ConfigError);
    EXPECT_THROW(make_schedule(kind, 2, 0, 4), ConfigError);
    EXPECT_THROW(make_schedule(kind, 2, 2, 0), ConfigError);
    EXPECT_THROW(make_schedule(kind, 4096, 2, 1 << 30), ConfigError);
    for (int p = 1; p <= 4; ++p)
      for (int v = 1; v <= 3; ++v)
        for (int m = 1; m <= 6; ++m)
          for (const bool forward_only : {false, true}) {
            if (is_possible(kind, p, v, m, forward_only)) continue;
            EXPECT_THROW(make_schedule(kind, p, v, m, forward_only), ConfigError);
          }
  }
  try {
    make_schedule(PipelineSchedule::interleaved, 4, 2, 6);
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("multiples of the 4 pipeline stages, not 6"), std::string::npos)
        << error.what();
  }
  try {
    make_schedule(PipelineSchedule::one_f_one_b, 4, 2, 8);
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("interleaved"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace tessera::test
