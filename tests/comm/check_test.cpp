#include "comm/check.hpp"

#include <gtest/gtest.h>

#include <array>

namespace tessera {
namespace {

CallSignature gather_call(const std::string& where) {
  CallSignature call;
  call.operation = "all_gather";
  call.dtype = "float32";
  call.send_counts = call.recv_counts = {2, 0, 5};
  call.where = where;
  return call;
}

TEST(CallSignature, TextIsReadBack) {
  CallSignature reduce;
  reduce.operation = "all_reduce";
  reduce.dtype = "bfloat16";
  reduce.count = 12345678901;
  reduce.reduction = "max";
  reduce.where = "my file.cpp:12";
  CallSignature barrier;
  barrier.operation = "barrier";
  barrier.where = "a.cpp:1";
  CallSignature broadcast = reduce;
  broadcast.root = 3;
  for (const CallSignature& call : {reduce, barrier, broadcast, gather_call("b.cpp:2")}) {
    const CallSignature read = CallSignature::decode(call.encode());
    EXPECT_EQ(read.operation, call.operation);
    EXPECT_EQ(read.dtype, call.dtype);
    EXPECT_EQ(read.count, call.count);
    EXPECT_EQ(read.reduction, call.reduction);
    EXPECT_EQ(read.root, call.root);
    EXPECT_EQ(read.send_counts, call.send_counts);
    EXPECT_EQ(read.recv_counts, call.recv_counts);
    EXPECT_EQ(read.where, call.where);
  }
}

TEST(CallSignature, OtherTextIsRefused) {
  const std::string text = gather_call("b.cpp:2").encode();
  for (const std::string& bad : {std::string(), std::string("all_gather"), text.substr(0, text.size() / 2),
                                 std::string("a b c d e 1 2 3"), std::string("a b 1 - 0 99999999999 1")}) {
    EXPECT_THROW(CallSignature::decode(bad), CommunicationError) << bad;
  }
}

TEST(FindMismatch, NamesTheTwoCalls) {
  std::array calls{gather_call("a.cpp:1"), gather_call("b.cpp:2"), gather_call("c.cpp:3")};
  const std::array names{4, 6, 8};
  EXPECT_EQ(find_mismatch(calls, names, "tp", 7), "");
  calls[2].recv_counts = calls[2].send_counts = {2, 1, 4};
  EXPECT_EQ(
      find_mismatch(calls, names, "tp", 7),
      "ranks of group tp called different things as operation 7: rank 4 all_gather of float32, blocks 2 0 5 "
      "at a.cpp:1; rank 8 all_gather of float32, blocks 2 1 4 at c.cpp:3");
}

TEST(FindMismatch, AllToAllIsComparedPairByPair) {
  std::array<CallSignature, 3> calls;
  for (std::size_t r = 0; r < 3; ++r) {
    calls[r].operation = "all_to_all";
    calls[r].dtype = "int64";
    calls[r].where = std::string(1, static_cast<char>('a' + r)) + ".cpp:1";
    for (std::int64_t other = 0; other < 3; ++other) {
      calls[r].send_counts.push_back(10 * static_cast<std::int64_t>(r) + other);
      calls[r].recv_counts.push_back(10 * other + static_cast<std::int64_t>(r));
    }
  }
  const std::array names{0, 1, 2};
  EXPECT_EQ(find_mismatch(calls, names, "ep", 0), "");
  ++calls[2].recv_counts[1];  // ranks 1 and 2 disagree, rank 0 with neither
  const std::string message = find_mismatch(calls, names, "ep", 0);
  EXPECT_NE(message.find("rank 1 all_to_all"), std::string::npos) << message;
  EXPECT_NE(message.find("rank 2 all_to_all"), std::string::npos) << message;
}

}  // namespace
}  // namespace tessera
