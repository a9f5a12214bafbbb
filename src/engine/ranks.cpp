#include "engine/ranks.hpp"

#include <algorithm>

#include "tessera/comm/bytes.hpp"
#include "tessera/comm/heartbeat.hpp"

namespace tessera {
namespace {

/// An error as text: a letter for its type, then its message. Empty: none.
template <typename Fn>
std::string error_of(Fn&& fn) {
  try {
    fn();
    return "";
  } catch (const ConfigError& error) {
    return std::string("C") + error.what();
  } catch (const DataError& error) {
    return std::string("D") + error.what();
  } catch (const CheckpointError& error) {
    return std::string("K") + error.what();
  } catch (const IoError& error) {
    return std::string("I") + error.what();
  } catch (const InvalidArgument& error) {
    return std::string("A") + error.what();
  } catch (const std::exception& error) {
    return std::string("E") + error.what();
  }
}

[[noreturn]] void throw_as(char type, const std::string& message) {
  switch (type) {
    case 'C':
      throw ConfigError(message);
    case 'D':
      throw DataError(message);
    case 'K':
      throw CheckpointError(message);
    case 'I':
      throw IoError(message);
    case 'A':
      throw InvalidArgument(message);
    default:
      throw Error(message);
  }
}

/// Before anybody throws, everybody must have heard of it: whoever throws may end the group, and the others
/// would then report that instead.
void wait_before_failing(const ExecCtx& ctx, Communicator& group) {
  try {
    group.barrier(ctx);
  } catch (const CommunicationError&) {
    // A rank has left the barrier and ended the group: so all had come.
  }
}

}  // namespace

std::string on_first_rank(const ExecCtx& ctx, Communicator& group, const std::function<std::string()>& fn) {
  std::string message;
  if (group.rank() == 0) {
    std::string result;
    const std::string error = error_of([&] { result = fn(); });
    message = error.empty() ? "+" + result : "-" + error;
  }
  message = broadcast_bytes(group, message);
  if (message[0] == '+') return message.substr(1);
  wait_before_failing(ctx, group);
  throw_as(message[1], message.substr(2));
}

void on_every_rank(const ExecCtx& ctx, Communicator& group, const std::function<void()>& fn) {
  const std::string own = error_of(fn);
  const auto errors = all_gather_bytes(group, own);
  const auto first = std::find_if(errors.begin(), errors.end(), [](const auto& e) { return !e.empty(); });
  if (first == errors.end()) return;
  wait_before_failing(ctx, group);
  // Who only heard of it ends as one that lost a peer, so that the launcher names the rank that failed.
  if (!own.empty()) throw_as(own[0], own.substr(1));
  throw CommunicationError(detail::concat("rank ", first - errors.begin(), " failed: ", first->substr(1)));
}

std::function<void()> heartbeat_of(Communicator& group) {
  return [&group] { heartbeat(group); };
}

double sum_over_ranks(const ExecCtx& ctx, Communicator& group, double value) {
  return sum_over_ranks(ctx, group, std::vector<double>{value})[0];
}

std::vector<double> sum_over_ranks(const ExecCtx& ctx, Communicator& group, std::vector<double> values) {
  if (group.size() == 1) return values;
  const Tensor sums = Tensor::from(ctx, values, {static_cast<std::int64_t>(values.size())});
  group.all_reduce(ctx, sums).wait(ctx);
  return sums.to_vector<double>();
}

}  // namespace tessera
