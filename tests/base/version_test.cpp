#include "tessera/base/version.hpp"

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

namespace tessera {
namespace {

TEST(Version, IsTheProjects) {
  std::ifstream file("CMakeLists.txt");
  ASSERT_TRUE(file.is_open()) << "run the tests from the repository's root";
  std::stringstream text;
  text << file.rdbuf();
  EXPECT_NE(text.str().find(std::string("VERSION ") + version() + " "), std::string::npos) << version();
}

}  // namespace
}  // namespace tessera
