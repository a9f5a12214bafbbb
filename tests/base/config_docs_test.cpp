#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "tessera/base/config_file.hpp"
#include "tessera/base/env.hpp"

namespace tessera {
namespace {

constexpr const char* kPage = "docs/configuration.md";
constexpr const char* kBegin = "<!-- keys: begin (written by the program; test_base compares) -->\n";
constexpr const char* kEnd = "<!-- keys: end -->\n";

std::string read_page() {
  std::ifstream file(kPage);
  EXPECT_TRUE(file.is_open()) << "run the tests from the repository's root";
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

struct Tables {
  std::string before, tables, after;
};

Tables split_page(const std::string& page) {
  const auto begin = page.find(kBegin);
  const auto end = page.find(kEnd);
  if (begin == std::string::npos || end == std::string::npos || end < begin) {
    ADD_FAILURE() << kPage << " has lost its marker lines";
    return {};
  }
  const auto first = begin + std::string(kBegin).size();
  return {page.substr(0, first), page.substr(first, end - first), page.substr(end)};
}

TEST(ConfigDocs, TablesAreUpToDate) {
  const std::string tables = "\n" + config_markdown().append("\n");
  EXPECT_EQ(split_page(read_page()).tables, tables)
      << "rewrite them: test_base --gtest_also_run_disabled_tests --gtest_filter='*RewriteTables'";
}

TEST(ConfigDocs, DISABLED_RewriteTables) {
  const Tables page = split_page(read_page());
  ASSERT_FALSE(page.before.empty());
  std::ofstream(kPage) << page.before << "\n" << config_markdown() << "\n" << page.after;
}

TEST(ConfigDocs, EveryVariableIsDocumented) {
  const std::string page = read_page();
  for (const EnvironmentVariable& variable : environment_variables()) {
    const std::string row = std::string("| `") + variable.name + "` | " + variable.meaning + " |\n";
    EXPECT_NE(page.find(row), std::string::npos) << row;
  }
}

// The examples of errors are promises too.
TEST(ConfigDocs, ExampleErrorsAreReal) {
  const std::string page = read_page();
  const std::string text =
      "model:\n"
      "  hidden_size: 768\n"
      "  num_layer: 3\n"
      "\n\n\n"
      "training:\n"
      "  precision: fp8\n";
  try {
    parse_config(text, "run.yaml", {"model.num_heads=7"});
    FAIL();
  } catch (const ConfigError& error) {
    const std::string message = error.what();
    std::istringstream lines(message);
    int count = 0;
    for (std::string line; std::getline(lines, line); ++count) {
      // The page shows another file: other columns, the same words.
      const auto reason = line.find(": ");
      EXPECT_NE(page.find(line.substr(reason)), std::string::npos) << line;
    }
    EXPECT_EQ(count, 3) << message;
  }
}

TEST(ConfigDocs, ExampleFileLoads) {
  const std::string page = read_page();
  const std::string open = "```yaml\n";
  const auto begin = page.find(open) + open.size();
  const Config config = parse_config(page.substr(begin, page.find("```", begin) - begin), "example");
  EXPECT_EQ(config.model.num_kv_heads, 2);
  EXPECT_EQ(config.optimizer.lr, 1e-3);
}

}  // namespace
}  // namespace tessera
