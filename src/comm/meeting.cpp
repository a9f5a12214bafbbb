#include "tessera/comm/meeting.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <tuple>
#include <utility>

#include "tessera/comm/bytes.hpp"

namespace tessera {
namespace {

constexpr std::size_t kWords = 1 + std::tuple_size_v<MeetingValues>;
using Message = std::array<std::int64_t, kWords>;

/// Mixes all bits of a word (the finaliser of splitmix64).
std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

[[noreturn]] void fail_apart(Communicator& group, std::string_view call,
                             const std::function<std::string()>& place) {
  std::string own(call);
  if (place) own += " at " + place();
  std::map<std::string, std::vector<int>> ranks_of;
  int rank = 0;
  for (const std::string& text : all_gather_bytes(group, own)) ranks_of[text].push_back(rank++);
  std::vector<std::pair<std::vector<int>, std::string>> calls;
  for (auto& [text, ranks] : ranks_of) calls.emplace_back(std::move(ranks), text);
  std::sort(calls.begin(), calls.end());

  std::string message = "ranks called different things: ";
  for (std::size_t i = 0; i < calls.size(); ++i)
    message += detail::concat(i > 0 ? "; " : "", ranks_text(calls[i].first), " called ", calls[i].second);
  throw InvalidArgument(
      message +
      ". Each of these needs every rank: call them on all ranks, in the same order, outside "
      "of conditions such as `if is_main_process`");
}

}  // namespace

std::uint64_t hash_bytes(std::span<const std::byte> bytes, std::uint64_t before) {
  // Two chains, so that the multiplications of one do not wait for those of the other.
  std::uint64_t a = mixed(before + bytes.size() + 0x9e3779b97f4a7c15u), b = ~a;
  std::size_t at = 0;
  const auto word = [&](std::size_t from, std::size_t count) {
    std::uint64_t value = 0;
    std::memcpy(&value, bytes.data() + from, count);
    return value;
  };
  for (; at + 16 <= bytes.size(); at += 16) {
    a = std::rotl((a ^ word(at, 8)) * 0x9fb21c651e98df25u, 29);
    b = std::rotl((b ^ word(at + 8, 8)) * 0xa0761d6478bd642fu, 31);
  }
  for (; at < bytes.size(); at += 8)
    a = std::rotl((a ^ word(at, std::min<std::size_t>(8, bytes.size() - at))) * 0x9fb21c651e98df25u, 29);
  return mixed(a ^ mixed(b));
}

std::string ranks_text(std::span<const int> ranks) {
  constexpr std::size_t kMost = 8;
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < std::min(ranks.size(), kMost); ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  if (ranks.size() > kMost) text += detail::concat(" and ", ranks.size() - kMost, " more");
  return text;
}

std::vector<MeetingValues> meet(Communicator& group, std::string_view call, const MeetingValues& values,
                                const std::function<std::string()>& place) {
  if (group.size() == 1) return {values};
  Message own;
  own[0] = static_cast<std::int64_t>(hash_bytes(std::as_bytes(std::span(call))));
  std::copy(values.begin(), values.end(), own.begin() + 1);

  const ExecCtx ctx = ExecCtx::cpu(1);
  const Tensor all = Tensor::empty(ctx, {group.size(), static_cast<std::int64_t>(kWords)}, DType::i64);
  // Where the others are not there (make_absent_communicator) they are taken to do the same.
  auto* messages = static_cast<Message*>(all.raw());
  std::fill_n(messages, group.size(), own);
  group.all_gather(ctx, all.narrow(0, group.rank(), 1), all).wait(ctx);

  std::vector<MeetingValues> result(static_cast<std::size_t>(group.size()));
  bool together = true;
  for (std::size_t r = 0; r < result.size(); ++r) {
    together &= messages[r][0] == messages[0][0];
    std::copy(messages[r].begin() + 1, messages[r].end(), result[r].begin());
  }
  if (!together) fail_apart(group, call, place);
  return result;
}

}  // namespace tessera
