/// Where a step's time goes: the table on made-up times, and whole runs that record some of their steps.

#include "tessera/engine/profile.hpp"

#include <map>
#include <nlohmann/json.hpp>

#include "tessera/base/model_math.hpp"
#include "tessera/engine/trainer.hpp"
#include "tests/engine/engine_support.hpp"
#include "tests/support/device.hpp"

namespace tessera {
namespace {

using Json = nlohmann::json;
using test::expect_error;
using test::slurp;

const StepTable::Row& row(const std::vector<StepTable::Row>& rows, const std::string& name) {
  for (const StepTable::Row& each : rows) {
    if (each.name == name) return each;
  }
  throw std::runtime_error("no row " + name);
}

TraceLane made_up() {
  return {.name = "host",
          .work = {{{WorkKind::gemm, "before"}, 0, 9},
                   {{WorkKind::scope, "F0"}, 10, 19},
                   {{WorkKind::gemm, "gemm", 100, 10}, 11, 15},
                   {{WorkKind::communication, "wait", 0, 1e9}, 12, 13},
                   {{WorkKind::elementwise, "add", 0, 40}, 15, 17},
                   {{WorkKind::elementwise, "add", 0, 40}, 19, 22}}};
}

TEST(StepTable, CountsEachMomentOnceForTheInnermostWork) {
  const std::vector<TimedStep> steps{{1, 10, 20}, {2, 20, 24}};
  const StepTable table = make_step_table(made_up(), steps, {.flops_per_s = 50, .bytes_per_s = 20});
  EXPECT_EQ(table.steps, 2);
  EXPECT_DOUBLE_EQ(table.seconds, 14);
  EXPECT_DOUBLE_EQ(row(table.kinds, "GEMM").seconds, 3);
  EXPECT_DOUBLE_EQ(row(table.kinds, "GEMM").floor_s, 2);
  EXPECT_EQ(row(table.kinds, "GEMM").calls, 1);
  EXPECT_DOUBLE_EQ(row(table.kinds, "exposed communication").seconds, 1);
  EXPECT_EQ(row(table.kinds, "exposed communication").floor_s, 0) << "all of it can be hidden";
  EXPECT_DOUBLE_EQ(row(table.kinds, "element-wise").seconds, 5);
  EXPECT_DOUBLE_EQ(row(table.kinds, "element-wise").floor_s, 4);
  EXPECT_DOUBLE_EQ(row(table.kinds, "host, idle").seconds, 5);
  EXPECT_EQ(table.operations.at(0).name, "add");
  EXPECT_EQ(table.operations[0].calls, 2);
  EXPECT_EQ(table.operations.size(), 3u);
  const std::string text = text_of(table);
  EXPECT_NE(text.find("TOTAL"), std::string::npos) << text;
  EXPECT_NE(text.find("7000.000    100.0"), std::string::npos) << text;
}

TEST(StepTable, WhatReachesBeyondAStepCountsAsFarAsItLiesInOne) {
  const std::vector<TimedStep> steps{{1, 14, 16}, {2, 18, 20}};
  const StepTable table = make_step_table(made_up(), steps, {});
  EXPECT_DOUBLE_EQ(table.seconds, 4);
  EXPECT_DOUBLE_EQ(row(table.kinds, "element-wise").seconds, 2);
  EXPECT_EQ(row(table.kinds, "element-wise").floor_s, 0);
}

TEST(TraceJson, MessagesThatOverlapLieSideBySide) {
  const TraceLane messages{.name = "communication \"pp\"",
                           .work = {{{WorkKind::communication, "a"}, 1, 3},
                                    {{WorkKind::communication, "b"}, 2, 4},
                                    {{WorkKind::communication, "c"}, 3, 5}},
                           .overlaps = true};
  const std::vector<TimedStep> steps{{7, 1, 5}};
  const Json trace = Json::parse(trace_json({made_up(), messages}, steps, 3, 0.5));
  std::map<std::string, int> threads;
  for (const Json& event : trace["traceEvents"]) {
    EXPECT_EQ(event["pid"], 3);
    if (event["name"] == "thread_name") threads[event["args"]["name"]] = event["tid"];
    if (event["name"] == "a") {
      EXPECT_DOUBLE_EQ(event["ts"], 5e5);
      EXPECT_DOUBLE_EQ(event["dur"], 2e6);
    }
  }
  EXPECT_EQ(threads,
            (std::map<std::string, int>{
                {"steps", 0}, {"host", 1}, {"communication \"pp\"", 2}, {"communication \"pp\" 2", 3}}));
}

struct ProfiledRun {
  std::vector<double> losses;
  std::map<std::int64_t, double> step_ms;
  std::vector<std::string> tables;
};

struct Profile : test::FolderTest {
  Config config(const std::string& name, std::vector<std::int64_t> window) {
    Config c = run_config(name, 0.1);
    c.model.hidden_size = 48;
    c.model.num_heads = c.model.num_kv_heads = 4;
    c.model.head_dim = 12;
    c.model.ffn_hidden_size = 64;
    c.training.steps = 6;
    c.logging.profile = std::move(window);
    return c;
  }

  static ProfiledRun run(const Config& config, int ranks = 1) {
    ProfiledRun result;
    test::run_ranks(ranks, {.timeout_s = 60}, [&](std::shared_ptr<Communicator> world) {
      TrainHooks hooks;
      hooks.on_step = [&](const StepRecord& r) {
        result.losses.push_back(r.loss);
        result.step_ms[r.step] = r.step_ms;
      };
      hooks.on_profile = [&](const std::string& table) { result.tables.push_back(table); };
      train(config, hooks, Logger::silent(), std::move(world));
    });
    return result;
  }

  Json trace(const std::string& name, int rank) {
    return Json::parse(slurp(dir_ / name / "profile" / ("trace_rank" + std::to_string(rank) + ".json")));
  }

  /// Events of the thread where the rank's own work runs.
  static std::vector<Json> own_work(const Json& trace) {
    std::vector<Json> events;
    for (const Json& event : trace["traceEvents"]) {
      if (event["ph"] == "X" && event["tid"] == 1) events.push_back(event);
    }
    return events;
  }

  static double flops_of(const Json& trace, const std::string& kind) {
    double sum = 0;
    for (const Json& event : own_work(trace)) {
      if (event["cat"] == kind) sum += event["args"]["flops"].get<double>();
    }
    return sum;
  }

  /// What a timeline must be for a viewer: times not negative, on each thread nested or apart.
  static void expect_sane(const Json& trace, int rank) {
    std::map<int, std::vector<std::pair<double, double>>> open;
    for (const Json& event : trace["traceEvents"]) {
      EXPECT_EQ(event["pid"], rank);
      if (event["ph"] != "X") continue;
      const double begin = event["ts"], end = begin + event["dur"].get<double>();
      EXPECT_GE(event["dur"].get<double>(), 0);
      auto& stack = open[event["tid"]];
      while (!stack.empty() && stack.back().second <= begin + 5e-4) stack.pop_back();
      if (!stack.empty()) {
        EXPECT_GE(begin, stack.back().first);
        EXPECT_LE(end, stack.back().second + 5e-4) << event;
      }
      stack.emplace_back(begin, end);
    }
  }

  /// The row of `name` in rank 0's table: milliseconds per step.
  static double milliseconds(const std::string& table, const std::string& name) {
    const auto at = table.find("\n" + name + " ");
    EXPECT_NE(at, std::string::npos) << name << "\n" << table;
    std::istringstream words(table.substr(at + 35, 60));
    double calls = 0, ms = 0;
    const bool counted = table.substr(at + 35, 9).find_first_not_of(' ') != std::string::npos;
    if (counted) words >> calls;
    words >> ms;
    return ms;
  }
};

TEST_F(Profile, TheTableAddsUpToTheStepAndChangesNoNumber) {
  const ProfiledRun plain = run(config("plain", {}));
  const auto step_of = [](const ProfiledRun& run) {
    return (run.step_ms.at(3) + run.step_ms.at(4) + run.step_ms.at(5)) / 3;
  };
  const auto work_in = [](const std::string& table) {
    double sum = 0;
    for (const char* kind :
         {"GEMM", "attention", "element-wise", "optimizer", "exposed communication", "data"})
      sum += milliseconds(table, kind);
    return sum;
  };
  // Steps are so short that others at work on the machine may take most of them: once in three runs they do
  // not.
  ProfiledRun seen = run(config("seen", {3, 6}));
  for (int more = 2; more > 0 && work_in(seen.tables.at(0)) <= 0.2 * step_of(seen); --more) {
    std::filesystem::remove_all(dir_ / "seen");
    seen = run(config("seen", {3, 6}));
  }
  EXPECT_EQ(seen.losses, plain.losses);
  EXPECT_FALSE(std::filesystem::exists(dir_ / "plain/profile"));
  ASSERT_EQ(seen.tables.size(), 1u);
  const std::string& table = seen.tables[0];
  EXPECT_EQ(slurp(dir_ / "seen/profile/steps.txt"), table);

  const double sum = work_in(table), idle = milliseconds(table, "host, idle"), step = step_of(seen);
  EXPECT_GE(idle, 0) << table;
  EXPECT_GT(sum, 0.2 * step) << table;
  EXPECT_NEAR(sum + idle, step, 0.03 * step) << table;
  EXPECT_NEAR(milliseconds(table, "TOTAL"), step, 0.03 * step) << table;

  const Json timeline = trace("seen", 0);
  expect_sane(timeline, 0);
  std::vector<std::string> steps;
  std::map<std::string, int> kinds;
  for (const Json& event : timeline["traceEvents"]) {
    if (event["ph"] != "X") continue;
    if (event["tid"] == 0) steps.push_back(event["name"]);
    ++kinds[event["cat"]];
  }
  EXPECT_EQ(steps, (std::vector<std::string>{"step 3", "step 4", "step 5"}));
  for (const char* kind : {"GEMM", "attention", "element-wise", "optimizer", "data", "scope"})
    EXPECT_GT(kinds[kind], 0) << kind;
}

TEST_F(Profile, OperationsAreThoseOfTheClosedFormula) {
  for (const bool llama : {false, true}) {
    Config c = config(llama ? "llama" : "gpt2", {2, 4});
    if (llama) {
      c.model = test::tiny_llama(0.1).model;
    }
    run(c);
    const Json timeline = trace(llama ? "llama" : "gpt2", 0);
    const double tokens = 2.0 * static_cast<double>(c.training.global_batch_size * c.training.seq_length);
    const double products = 6.0 * static_cast<double>(matmul_weight_count(c.model)) * tokens;
    EXPECT_DOUBLE_EQ(flops_of(timeline, "GEMM"), products);
    // The formula takes half of the square, has no diagonal, and forgets that backward makes the scores
    // again.
    const double whole = flops_per_token(c.model, c.training.seq_length, FlopConvention::causal) * tokens;
    const double length = static_cast<double>(c.training.seq_length);
    EXPECT_NEAR(flops_of(timeline, "attention"), (whole - products) * (length + 1) / length * 7 / 6,
                1e-9 * whole);
  }
}

TEST_F(Profile, EveryRankWritesItsTimeline) {
  if (test::ProcessRank::from_environment()) GTEST_SKIP() << "each process has a folder of its own";
  Config plain = config("plain", {}), seen = config("seen", {2, 4});
  for (Config* c : {&plain, &seen}) {
    c->parallel.tensor = 2;
    c->parallel.pipeline = 2;
  }
  EXPECT_EQ(run(seen, 4).losses, run(plain, 4).losses);
  double products = 0;
  for (int rank = 0; rank < 4; ++rank) {
    const Json timeline = trace("seen", rank);
    expect_sane(timeline, rank);
    products += flops_of(timeline, "GEMM");
    std::map<std::string, int> names;
    for (const Json& event : timeline["traceEvents"])
      ++names[event["name"] == "thread_name" ? event["args"]["name"] : event["name"]];
    for (const char* name : {"F0", "B1", "communication pp", "communication tp", "wait all_reduce tp"})
      EXPECT_GT(names[name], 0) << name << " of rank " << rank;
  }
  const double tokens = 2.0 * static_cast<double>(seen.training.global_batch_size * seen.training.seq_length);
  EXPECT_DOUBLE_EQ(products, 6.0 * static_cast<double>(matmul_weight_count(seen.model)) * tokens);
  const std::string tables = slurp(dir_ / "seen/profile/steps.txt");
  for (const char* rank : {"rank 0 of 4", "rank 3 of 4"})
    EXPECT_NE(tables.find(rank), std::string::npos) << tables;
}

TEST_F(Profile, AWindowThatIsPastIsLeftOut) {
  Config c = config("run", {2, 4});
  c.training.steps = 4;
  EXPECT_EQ(run(c).tables.size(), 1u);
  c.training.steps = 6;
  EXPECT_EQ(run(c).tables.size(), 0u);
  c.training.steps = 8;
  c.logging.profile = {1, 9};  // begins with the first step of this part of the run
  const ProfiledRun rest = run(c);
  ASSERT_EQ(rest.tables.size(), 1u);
  EXPECT_EQ(rest.tables[0].find("Steps 7 to 8"), 0u) << rest.tables[0];
}

TEST_F(Profile, AnInterruptedRunWritesWhatWasSeen) {
  const Config c = config("run", {2, 6});
  std::string table;
  std::int64_t last = 0;
  TrainHooks hooks;
  hooks.on_step = [&](const StepRecord& r) { last = r.step; };
  hooks.should_stop = [&] { return last == 3; };
  hooks.on_profile = [&](const std::string& text) { table = text; };
  EXPECT_TRUE(train(c, hooks, Logger::silent()).interrupted);
  EXPECT_EQ(table.find("Steps 2 to "), 0u) << table;
  expect_sane(trace("run", 0), 0);
}

}  // namespace
}  // namespace tessera
