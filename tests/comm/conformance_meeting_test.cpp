/// Meetings: what ranks are about to do is compared before they do it, on every kind of communicator.

#include <set>

#include "tessera/comm/meeting.hpp"
#include "tests/comm/conformance.hpp"

namespace tessera::test {
namespace {

TEST_P(Conformance, AMeetingTellsWhatEachRankGave) {
  on_each_size(1, 5, [](const auto& comm) {
    for (std::int64_t turn = 0; turn < 3; ++turn) {
      const auto told = meet(*comm, "a call", {comm->rank() + 1, -turn, std::int64_t{1} << 62});
      ASSERT_EQ(told.size(), static_cast<std::size_t>(comm->size()));
      for (int r = 0; r < comm->size(); ++r)
        EXPECT_EQ(told[static_cast<std::size_t>(r)], (MeetingValues{r + 1, -turn, std::int64_t{1} << 62}));
    }
  });
}

TEST_P(Conformance, WhoCallsSomethingElseIsNamedOnEveryRank) {
  on_each_size(2, 4, [](const auto& comm) {
    const bool odd = comm->rank() == 1;
    const auto place = [&] { return std::string(odd ? "b.py:2" : "a.py:1"); };
    const std::string first = comm->size() == 2   ? "rank 0 called save() at a.py:1"
                              : comm->size() == 3 ? "ranks 0 and 2 called save() at a.py:1"
                                                  : "ranks 0, 2 and 3 called save() at a.py:1";
    try {
      meet(*comm, odd ? "step()" : "save()", {}, place);
      ADD_FAILURE() << "rank " << comm->rank() << " was told nothing";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(first + "; rank 1 called step() at b.py:2"), std::string::npos)
          << error.what();
    }
    // The group goes on.
    EXPECT_EQ(meet(*comm, "save()", {7}, place).back()[0], 7);
  });
}

TEST(Meeting, HashesTellBytesApart) {
  std::set<std::uint64_t> seen;
  std::vector<std::int32_t> values(37);
  const auto hash = [&](std::size_t count) {
    return hash_bytes(std::as_bytes(std::span(values)).first(count));
  };
  for (std::size_t count = 0; count <= values.size() * 4; ++count) seen.insert(hash(count));
  for (std::size_t i = 0; i < values.size(); ++i) {
    for (const std::int32_t value : {1, 2, -1, 1 << 30}) {
      values[i] = value;
      seen.insert(hash(values.size() * 4));
    }
    values[i] = 0;
  }
  EXPECT_EQ(seen.size(), values.size() * 4 + 1 + values.size() * 4);
  EXPECT_EQ(hash(9), hash(9));
  EXPECT_NE(hash_bytes({}, 1), hash_bytes({}, 2));
}

}  // namespace
}  // namespace tessera::test
