/// Every table of p 2..4, m 4..8, v 2, 3 against the files in golden/. A table that changes on purpose: the
/// failing test says where it wrote the new file.

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "support.hpp"

namespace tessera::test {
namespace {

class Golden : public testing::TestWithParam<PipelineSchedule> {};

std::string all_tables(PipelineSchedule kind) {
  std::string text;
  for (int p = 2; p <= 4; ++p)
    for (int v = 1; v <= 3; ++v)
      for (int m = 4; m <= 8; ++m)
        if (is_possible(kind, p, v, m, false)) {
          const Schedule schedule = make_schedule(kind, p, v, m);
          text += "# " + describe(schedule) + "\n" + to_text(schedule);
        }
  return text;
}

TEST_P(Golden, TablesAreUnchanged) {
  const std::string name = std::string(name_of(GetParam())) + ".txt";
  std::stringstream golden;
  golden << std::ifstream("tests/pipeline/golden/" + name).rdbuf();
  const std::string tables = all_tables(GetParam());
  EXPECT_FALSE(tables.empty());
  if (tables == golden.str()) return;
  const std::string path = testing::TempDir() + name;
  std::ofstream(path) << tables;
  ADD_FAILURE() << "tests/pipeline/golden/" << name << " differs from what the generator makes: " << path;
}

INSTANTIATE_TEST_SUITE_P(Schedules, Golden, testing::ValuesIn(kSchedules), [](const auto& info) {
  std::string name(name_of(info.param));
  std::erase(name, '-');
  return "of_" + name;
});

}  // namespace
}  // namespace tessera::test
