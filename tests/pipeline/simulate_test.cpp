#include <gtest/gtest.h>

#include <algorithm>
#include <regex>

#include "support.hpp"
#include "tessera/base/error.hpp"

namespace tessera::test {
namespace {

constexpr PassTimes kEqual{};

/// Time a stage does not work, of the whole.
double idle_time(const Schedule& schedule, const PassTimes& t) {
  const double work =
      (t.forward + t.input_gradient + t.weight_gradient) * schedule.micro_batches * schedule.chunks;
  return simulate(schedule, {t}).makespan - work;
}

TEST(Simulate, BubblesAreThoseOfThePapers) {
  for (int p = 1; p <= 8; ++p)
    for (int m = std::max(p, 2); m <= 4 * p; m += p) {
      for (const PassTimes& t : {kEqual, PassTimes{2, 3, 1, 0}}) {
        const double all = t.forward + t.input_gradient + t.weight_gradient;
        for (const PipelineSchedule kind : {PipelineSchedule::gpipe, PipelineSchedule::one_f_one_b}) {
          const Schedule schedule = make_schedule(kind, p, 1, m);
          EXPECT_DOUBLE_EQ(idle_time(schedule, t), (p - 1) * all) << describe(schedule);
        }
        if (m % p == 0)
          for (int v = 2; v <= 3; ++v) {
            const Schedule schedule = make_schedule(PipelineSchedule::interleaved, p, v, m);
            // One chunk's passes take 1/v of a stage's.
            EXPECT_DOUBLE_EQ(idle_time(schedule, t), (p - 1) * all) << describe(schedule);
          }
      }
      const Schedule h1 = make_schedule(PipelineSchedule::zb_h1, p, 1, m);
      EXPECT_DOUBLE_EQ(idle_time(h1, kEqual), (p - 1) * (1 + 1 - 1)) << describe(h1);
    }
}

/// A stage of zb-v idles only until its first input comes and after the last B has passed it: p - 1 half-size
/// passes together, none in between.
TEST(Simulate, FoldedZeroBubbleHasNoGaps) {
  for (int p = 1; p <= 8; ++p)
    for (int m = std::max(1, 2 * p - 1); m <= 3 * p; ++m) {
      const Schedule schedule = make_schedule(PipelineSchedule::zb_v, p, 2, m);
      const Simulation simulation = simulate(schedule, {kEqual});
      EXPECT_DOUBLE_EQ(idle_time(schedule, kEqual), p - 1) << describe(schedule);
      std::vector<double> first(static_cast<std::size_t>(p), 1e9), last(static_cast<std::size_t>(p), 0.0);
      for (const TimedAction& timed : simulation.actions) {
        const auto s = static_cast<std::size_t>(timed.stage);
        first[s] = std::min(first[s], timed.begin);
        last[s] = std::max(last[s], timed.end);
      }
      for (std::size_t s = 0; s < first.size(); ++s) EXPECT_DOUBLE_EQ(last[s] - first[s], 6.0 * m);
    }
}

TEST(Simulate, ZeroBubblesAreSmallerThanOneForwardOneBackwards) {
  const std::vector<PassTimes> realistic = {{1.0, 1.1, 0.9, 0.02}};
  for (int p = 2; p <= 8; ++p)
    for (int m = p; m <= 4 * p; m += p) {
      const double plain = simulate(make_schedule(PipelineSchedule::one_f_one_b, p, 1, m), realistic).bubble;
      const double h1 = simulate(make_schedule(PipelineSchedule::zb_h1, p, 1, m), realistic).bubble;
      const double folded = simulate(make_schedule(PipelineSchedule::zb_v, p, 2, m), realistic).bubble;
      EXPECT_LT(h1, 0.62 * plain) << p << ' ' << m;
      EXPECT_LT(folded, h1) << p << ' ' << m;
    }
}

TEST(Simulate, MemoryIsThatOfThePapers) {
  for (int p = 1; p <= 8; ++p)
    for (int m = 1; m <= 16; ++m) {
      const auto held = [&](PipelineSchedule kind, int v) {
        return simulate(make_schedule(kind, p, v, m), {kEqual}).most_in_flight;
      };
      const auto gpipe = held(PipelineSchedule::gpipe, 1), plain = held(PipelineSchedule::one_f_one_b, 1);
      const auto h1 = held(PipelineSchedule::zb_h1, 1), folded = held(PipelineSchedule::zb_v, 2);
      for (int r = 0; r < p; ++r) {
        const auto s = static_cast<std::size_t>(r);
        EXPECT_EQ(gpipe[s], p == 1 ? 1 : m);
        EXPECT_EQ(plain[s], std::min(p - r, m));
        EXPECT_EQ(h1[s], std::min(p, m));
        EXPECT_LE(folded[s], std::min(2 * p, 2 * m));
      }
      if (p > 1 && m % p == 0) {
        const auto interleaved = held(PipelineSchedule::interleaved, 2);
        for (int r = 0; r < p; ++r) {
          EXPECT_EQ(interleaved[static_cast<std::size_t>(r)], std::min(2 * (p - r - 1) + p + 1, 2 * m));
        }
      }
    }
}

TEST(Simulate, TimesOfPiecesAndTransfersCount) {
  const Schedule schedule = make_schedule(PipelineSchedule::one_f_one_b, 2, 1, 1);
  const Simulation s = simulate(schedule, {{1, 2, 3, 0.5}, {10, 20, 30, 0.25}});
  ASSERT_EQ(s.actions.size(), 4u);
  EXPECT_DOUBLE_EQ(s.actions[1].begin, 1.5);
  EXPECT_DOUBLE_EQ(s.actions[2].begin, 11.5);
  EXPECT_DOUBLE_EQ(s.actions[3].begin, 61.75);
  EXPECT_DOUBLE_EQ(s.makespan, 66.75);
  EXPECT_DOUBLE_EQ(s.bubble, 1 - (6 + 60) / (2 * 66.75));
  // From one chunk to the other on a stage nothing is sent.
  const Schedule folded = make_schedule(PipelineSchedule::zb_v, 1, 2, 1);
  EXPECT_DOUBLE_EQ(simulate(folded, {{1, 1, 1, 100}}).makespan, 6.0);
}

TEST(Simulate, RefusesWhatCannotRun) {
  Schedule schedule = make_schedule(PipelineSchedule::one_f_one_b, 2, 1, 2);
  EXPECT_THROW(simulate(schedule, {}), InvalidArgument);
  EXPECT_THROW(simulate(schedule, {kEqual, kEqual, kEqual}), InvalidArgument);
  EXPECT_THROW(simulate(schedule, {{-1, 1, 1, 0}}), InvalidArgument);
  schedule.actions[0].erase(schedule.actions[0].begin() + 1);
  try {
    simulate(schedule, {kEqual});
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("stage 0 at B1 (pass 3 of 3), stage 1 at F1"), std::string::npos)
        << error.what();
  }
  schedule.actions[0].push_back({Kind::forward, 0, 7});
  EXPECT_THROW(simulate(schedule, {kEqual}), InvalidArgument);
}

TEST(Picture, ShowsPassesToScale) {
  EXPECT_EQ(to_picture(make_schedule(PipelineSchedule::zb_h1, 2, 1, 2), {{1, 1, 2, 0}}, 60),
            "zb-h1: 2 stages, 2 micro-batches, bubble 11.1 %\n"
            "                                      held\n"
            "stage 0 |F0 F1 ...B0 W0    B1 W1    | 2\n"
            "stage 1 |...F0 B0 F1 B1 W0    W1    | 2\n"
            "F forward, B backward, W weight gradient, . idle; held: the most activations at once\n");
}

TEST(Picture, FitsItsWidth) {
  for_all_schedules(5, 3, 10, [](const Schedule& schedule) {
    for (const int width : {40, 80, 200}) {
      std::string picture = to_picture(schedule, {{1.0, 1.3, 0.9, 0.1}}, width);
      picture.erase(picture.rfind("F forward"));
      picture.erase(0, picture.find('\n') + 1);
      std::size_t widest = 0, begin = 0;
      for (std::size_t end; (end = picture.find('\n', begin)) != std::string::npos; begin = end + 1) {
        widest = std::max(widest, end - begin);
      }
      EXPECT_LE(widest, static_cast<std::size_t>(width)) << describe(schedule) << "\n" << picture;
    }
  });
  EXPECT_THROW(to_picture(make_schedule(PipelineSchedule::gpipe, 2, 1, 2), {kEqual}, 10), InvalidArgument);
}

std::size_t count(const std::string& text, const std::string& pattern) {
  const std::regex regex(pattern);
  return static_cast<std::size_t>(
      std::distance(std::sregex_iterator(text.begin(), text.end(), regex), std::sregex_iterator()));
}

TEST(Svg, HasABarForEveryPass) {
  const Schedule schedule = make_schedule(PipelineSchedule::zb_v, 3, 2, 6);
  const std::string svg = to_svg(schedule, {kEqual});
  EXPECT_EQ(svg.rfind("<svg xmlns=\"http://www.w3.org/2000/svg\"", 0), 0u);
  EXPECT_EQ(count(svg, "<title>"), 3u * 2 * 6 * 3);
  EXPECT_EQ(count(svg, ">F5b</text>"), 3u);
  EXPECT_EQ(count(svg, ">stage [012]</text>"), 3u);
  // Every element is closed: all tags but <svg>, <text>, <title> and bars close themselves.
  EXPECT_EQ(count(svg, "<(svg|text|title|rect|line)\\b"), count(svg, "</(svg|text|title|rect)>|/>"));
  EXPECT_EQ(count(svg, "nan|inf|href"), 0u);
  // Three kinds in two shades, the background and the stages' rows.
  EXPECT_EQ(count(svg, "B: input gradient"), 1u);
  EXPECT_EQ(count(svg, "<rect "), 3u * 2 * 6 * 3 + 6 + 1 + 3);
}

}  // namespace
}  // namespace tessera::test
