#include "tessera/base/error.hpp"

#include <gtest/gtest.h>

#include "tests/support/errors.hpp"

namespace tessera {
namespace {

using test::message_of;

TEST(Check, MessageHasValuesAndPlaceButNotTheExpression) {
  const int n = 3;
  const std::string message =
      message_of<InvalidArgument>([&] { TESSERA_CHECK(n == 4, "n is ", n, ", x is ", 0.25); });
  EXPECT_EQ(message.find("n is 3, x is 0.25 (error_test.cpp:"), 0u) << message;
}

TEST(Check, HoldsQuietlyAndDoesNotEvaluateTheMessage) {
  int evaluations = 0;
  TESSERA_CHECK(true, ++evaluations);
  EXPECT_EQ(evaluations, 0);
  EXPECT_NO_THROW(TESSERA_CHECK(1 < 2));
}

TEST(Check, WithoutParts) {
  const std::string message = message_of<InvalidArgument>([] { TESSERA_CHECK(1 > 2); });
  EXPECT_EQ(message.find("[1 > 2] (error_test.cpp:"), 0u) << message;
}

TEST(Check, EnsureThrowsTheTypeAsked) {
  EXPECT_THROW(TESSERA_ENSURE(DataError, false, "x"), DataError);
  EXPECT_THROW(TESSERA_ENSURE(ConfigError, false, "x"), ConfigError);
  EXPECT_THROW(TESSERA_ENSURE(IoError, false, "x"), Error);
  EXPECT_THROW(TESSERA_ENSURE(CheckpointError, false, "x"), std::runtime_error);
}

TEST(Check, EqualShowsBothSidesAndEvaluatesOnce) {
  int calls = 0;
  const auto next = [&calls] { return ++calls; };
  TESSERA_CHECK_EQ(next(), 1);
  EXPECT_EQ(calls, 1);
  const std::string message =
      message_of<InvalidArgument>([&] { TESSERA_CHECK_EQ(next(), 7, "for axis ", 2); });
  EXPECT_EQ(message.find("2 is not 7. for axis 2 (error_test.cpp:"), 0u) << message;
}

TEST(Check, WorksInAnUnbracedIf) {
  bool reached = false;
  if (false)
    TESSERA_CHECK(false, "never");
  else
    reached = true;
  EXPECT_TRUE(reached);
}

}  // namespace
}  // namespace tessera
