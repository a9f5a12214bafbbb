#include "tessera/comm/meeting.hpp"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "tessera/base/hash.hpp"
#include "tessera/comm/bytes.hpp"

namespace tessera {
namespace {

constexpr std::size_t kWords = 1 + std::tuple_size_v<MeetingValues>;
using Message = std::array<std::int64_t, kWords>;

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
  own[0] = static_cast<std::int64_t>(content_hash(std::as_bytes(std::span(call))));
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
