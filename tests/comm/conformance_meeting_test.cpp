/// Meetings: what ranks are about to do is compared before they do it, on every kind of communicator.

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

}  // namespace
}  // namespace tessera::test
