/// NCCL between threads.

#include "nccl.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "emulator.hpp"
#include "tessera/base/dtype.hpp"

namespace tessera_emulator {
namespace {

struct Call {
  enum class Kind { all_reduce, reduce, reduce_scatter, all_gather, broadcast, send, recv };
  Kind kind;
  const void* in;
  void* out;
  std::size_t count;
  ncclDataType_t type;
  ncclRedOp_t op;
  int other;  ///< root or peer
  cudaStream_t stream;
  /// The number of the group among those of its member that were recorded, from 1; 0 if it was not. Ranks
  /// call an operation out of graphs that they recorded together, or none of them out of a graph.
  std::uint64_t recorded = 0;
};

std::size_t size_of(ncclDataType_t type) {
  constexpr std::size_t kSizes[]{1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return kSizes[type];
}

struct Offer {
  const void* data;
  std::size_t bytes;
  std::uint64_t recorded = 0;  ///< Call::recorded
  bool taken = false;
};

/// A collective that not all ranks have come to.
struct Round {
  std::map<int, Call> calls;
  bool done = false;
};

struct Member;
/// A split that not all ranks have come to.
struct Split {
  struct Wish {
    int color, key;
    bool blocking;
  };
  std::map<int, Wish> wishes;
  std::map<int, std::shared_ptr<Member>> made;
  bool done = false;
};

/// What the ranks of one communicator share.
struct Clique {
  explicit Clique(int size) : size(size) {}
  const int size;
  std::mutex mutex;
  std::condition_variable changed;
  int joined = 0;
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Offer>>> offers;  // by sender and receiver
  std::map<std::uint64_t, std::shared_ptr<Round>> rounds;
  std::map<std::uint64_t, std::shared_ptr<Split>> splits;
};

/// One rank's side. Everything is guarded by the clique's mutex.
struct Member {
  std::shared_ptr<Clique> clique;
  int rank = 0, device = 0;
  bool blocking = true, joined = false, aborted = false, finalizing = false;
  int polls = 0;  ///< so often ncclInProgress is still the answer
  ncclResult_t error = ncclSuccess;
  std::uint64_t issued = 0, executed = 0, collectives = 0, splits = 0, recorded = 0;
  std::set<std::uint64_t> given_up;  ///< of those issued
  std::shared_ptr<Split> splitting;
  ncclComm_t* split_target = nullptr;
  std::function<void()> background;  ///< calls that a thread of NCCL is about to launch
  /// Held by graphs that may launch calls of this member.
  std::shared_ptr<int> graphs = std::make_shared<int>();
};
using MemberPtr = std::shared_ptr<Member>;

struct Registry {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<Clique>> cliques;
  std::map<int, ncclResult_t> planted;  ///< errors, by device
  NcclCounts counts;
};
Registry& registry() {
  static Registry* const instance = new Registry;
  return *instance;
}

template <typename T, typename Wide>
void reduce_as(const std::vector<const void*>& sources, std::size_t count, ncclRedOp_t op, void* target) {
  std::vector<T> sums(count);
  std::memcpy(sums.data(), sources.back(), count * sizeof(T));
  for (auto source = sources.rbegin() + 1; source != sources.rend(); ++source) {
    const T* values = static_cast<const T*>(*source);
    for (std::size_t i = 0; i < count; ++i) {
      const Wide a = static_cast<Wide>(sums[i]), b = static_cast<Wide>(values[i]);
      sums[i] = static_cast<T>(op == ncclSum ? a + b : (a > b ? a : b));
    }
  }
  std::memcpy(target, sums.data(), count * sizeof(T));
}

void reduce(const std::vector<const void*>& sources, std::size_t count, ncclDataType_t type, ncclRedOp_t op,
            void* target) {
  if (count == 0) return;
  switch (type) {
    case ncclFloat32:
      return reduce_as<float, float>(sources, count, op, target);
    case ncclFloat64:
      return reduce_as<double, double>(sources, count, op, target);
    case ncclBfloat16:
      return reduce_as<tessera::bfloat16, float>(sources, count, op, target);
    case ncclFloat16:
      return reduce_as<tessera::float16, float>(sources, count, op, target);
    case ncclInt64:
      return reduce_as<std::int64_t, std::int64_t>(sources, count, op, target);
    default:
      return reduce_as<std::int32_t, std::int32_t>(sources, count, op, target);
  }
}

const std::byte* at(const void* data, std::size_t offset) {
  return static_cast<const std::byte*>(data) + offset;
}

/// Results come to lie only when all are known, as outputs may be inputs.
void execute(const Round& round, int size) {
  const Call& any = round.calls.at(0);
  const std::size_t block = any.count * size_of(any.type);
  const bool gathers = any.kind == Call::Kind::all_gather, scatters = any.kind == Call::Kind::reduce_scatter;
  std::vector<std::vector<std::byte>> results(static_cast<std::size_t>(size));
  for (int r = 0; r < size; ++r) {
    auto& result = results[static_cast<std::size_t>(r)];
    if (any.kind == Call::Kind::reduce && r != any.other) continue;
    if (gathers) {
      for (const auto& [rank, call] : round.calls)
        result.insert(result.end(), at(call.in, 0), at(call.in, block));
    } else if (any.kind == Call::Kind::broadcast) {
      const void* root = round.calls.at(any.other).in;
      result.assign(at(root, 0), at(root, block));
    } else {
      std::vector<const void*> sources;
      for (const auto& [rank, call] : round.calls)
        sources.push_back(at(call.in, scatters ? static_cast<std::size_t>(r) * block : 0));
      result.resize(block);
      reduce(sources, any.count, any.type, any.op, result.data());
    }
  }
  for (int r = 0; r < size; ++r) {
    const auto& result = results[static_cast<std::size_t>(r)];
    if (!result.empty()) std::memcpy(round.calls.at(r).out, result.data(), result.size());
  }
}

bool agree(const Call& a, const Call& b) {
  return a.kind == b.kind && a.count == b.count && a.type == b.type && a.op == b.op && a.other == b.other;
}

using Lock = std::unique_lock<std::mutex>;

void run_collective(Member& member, Lock& lock, const Call& call) {
  Clique& clique = *member.clique;
  const std::uint64_t number = member.collectives++;
  auto& slot = clique.rounds[number];
  if (!slot) slot = std::make_shared<Round>();
  const auto round = slot;
  round->calls.emplace(member.rank, call);
  const bool complete = static_cast<int>(round->calls.size()) == clique.size;
  const bool fits = std::all_of(round->calls.begin(), round->calls.end(),
                                [&](const auto& each) { return agree(each.second, call); });
  const bool apart = std::any_of(round->calls.begin(), round->calls.end(),
                                 [&](const auto& each) { return each.second.recorded != call.recorded; });
  if (apart) member.error = ncclInvalidUsage;
  if (complete && fits && !apart) {
    execute(*round, clique.size);
    round->done = true;
    clique.rounds.erase(number);
    clique.changed.notify_all();
  }
  clique.changed.wait(lock, [&] { return round->done || member.aborted; });
}

void receive(Member& member, Lock& lock, const Call& call) {
  auto& queue = member.clique->offers[{call.other, member.rank}];
  member.clique->changed.wait(lock, [&] { return !queue.empty() || member.aborted; });
  if (member.aborted) return;
  const auto offer = queue.front();
  queue.pop_front();
  const std::size_t bytes = call.count * size_of(call.type);
  if (offer->bytes != bytes || offer->recorded != call.recorded) member.error = ncclInvalidUsage;
  member.clique->changed.wait(lock, [&] { return offer->recorded == call.recorded || member.aborted; });
  if (member.aborted) return;
  std::memcpy(call.out, offer->data, std::min(bytes, offer->bytes));
  offer->taken = true;
  member.clique->changed.notify_all();
}

/// The place of a group's calls among all of its member: of recorded calls at each launch of their graph.
/// Given up if they never run, as their stream failed before.
struct Turn {
  MemberPtr member;
  std::uint64_t ticket = 0;
  bool taken = false;

  Turn(MemberPtr of, std::uint64_t number) : member(std::move(of)), ticket(number) {}
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  ~Turn() {
    if (taken) return;
    const Lock lock(member->clique->mutex);
    member->given_up.insert(ticket);
    member->clique->changed.notify_all();
  }
  bool has_come() {
    while (member->given_up.erase(member->executed) > 0) ++member->executed;
    return member->executed == ticket || member->aborted;
  }
};

/// One group's calls, on the stream's thread.
void run(Turn& turn, const std::vector<Call>& calls) {
  Member& member = *turn.member;
  Clique& clique = *member.clique;
  Lock lock(clique.mutex);
  turn.taken = true;
  clique.changed.wait(lock, [&] { return turn.has_come(); });
  std::vector<std::shared_ptr<Offer>> sent;
  for (const Call& call : calls) {
    if (call.kind != Call::Kind::send || member.aborted) continue;
    sent.push_back(std::make_shared<Offer>(Offer{call.in, call.count * size_of(call.type), call.recorded}));
    clique.offers[{member.rank, call.other}].push_back(sent.back());
  }
  clique.changed.notify_all();
  for (const Call& call : calls) {
    if (member.aborted) return;
    if (call.kind == Call::Kind::recv) receive(member, lock, call);
    if (call.kind < Call::Kind::send) run_collective(member, lock, call);
  }
  clique.changed.wait(lock, [&] {
    return member.aborted || std::all_of(sent.begin(), sent.end(), [](auto& offer) { return offer->taken; });
  });
  ++member.executed;
  clique.changed.notify_all();
}

thread_local int depth = 0;
thread_local std::vector<std::pair<MemberPtr, Call>> grouped;

/// Makes the communicators of a split that every rank has come to.
void divide(Split& split) {
  std::map<int, std::vector<std::pair<int, int>>> groups;  // colour -> key and rank before
  for (const auto& [rank, wish] : split.wishes) {
    if (wish.color >= 0) groups[wish.color].emplace_back(wish.key, rank);
  }
  for (auto& [color, ranks] : groups) {
    std::sort(ranks.begin(), ranks.end());
    auto clique = std::make_shared<Clique>(static_cast<int>(ranks.size()));
    clique->joined = clique->size;
    int next = 0;
    for (const auto& [key, rank] : ranks) {
      auto member = std::make_shared<Member>();
      member->clique = clique;
      member->rank = next++;
      member->blocking = split.wishes.at(rank).blocking;
      member->polls = 2;
      split.made[rank] = std::move(member);
    }
  }
  split.done = true;
}

ncclResult_t issue(const MemberPtr& member, std::vector<Call> calls) {
  std::function<void()> launch;  // outlives the lock, which a turn may take
  const Lock lock(member->clique->mutex);
  if (!member->joined || member->aborted || member->finalizing) return ncclInvalidUsage;
  const cudaStream_t stream = calls.front().stream;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaStreamIsCapturing(stream, &status);
  if (status == cudaStreamCaptureStatusNone) {
    const auto turn = std::make_shared<Turn>(member, member->issued++);
    launch = [turn, stream, calls = std::move(calls)] {
      enqueue(stream, "NCCL", [turn, calls] { run(*turn, calls); });
    };
  } else {
    ++member->recorded;
    for (Call& call : calls) call.recorded = member->recorded;
    launch = [member, stream, graph = member->graphs, calls = std::move(calls)] {
      record(stream, "NCCL", [member, graph, calls] {
        const Lock at_launch(member->clique->mutex);
        const auto turn = std::make_shared<Turn>(member, member->issued++);
        return [turn, calls] { run(*turn, calls); };
      });
    };
  }
  if (!member->blocking) {
    if (member->background) return ncclInvalidUsage;  // what was called before is not done
    member->background = launch;
    member->polls = 2;
    return ncclInProgress;
  }
  launch();
  return member->error;
}

}  // namespace
}  // namespace tessera_emulator

using namespace tessera_emulator;

struct ncclComm {
  MemberPtr member;
};

void tessera_emulator::plant_nccl_error(int device, int result) {
  const std::lock_guard lock(registry().mutex);
  registry().planted[device] = static_cast<ncclResult_t>(result);
}

NcclCounts tessera_emulator::nccl_counts() {
  const std::lock_guard lock(registry().mutex);
  return registry().counts;
}

/// NCCL waits there until the last of them is destroyed.
static void look_for_graphs(const Member& member) {
  if (member.graphs.use_count() == 1) return;
  const std::lock_guard lock(registry().mutex);
  ++registry().counts.outlived;
}

static ncclResult_t add(ncclComm_t comm, const Call& call) {
  if (comm == nullptr || call.stream == nullptr) return ncclInvalidArgument;
  if (call.other < -1 || call.other >= comm->member->clique->size) return ncclInvalidArgument;
  grouped.emplace_back(comm->member, call);
  if (depth > 0) return ncclSuccess;
  ++depth;
  return ncclGroupEnd();
}

const char* ncclGetErrorString(ncclResult_t result) {
  constexpr const char* kTexts[]{"no error",
                                 "unhandled cuda error",
                                 "unhandled system error",
                                 "internal error",
                                 "invalid argument",
                                 "invalid usage",
                                 "remote process exited or there was a network error",
                                 "NCCL operation in progress"};
  return kTexts[result];
}

const char* ncclGetLastError(ncclComm_t) { return "the emulated NCCL says no more"; }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static std::atomic<std::uint64_t> next{1};
  *id = {};
  const std::uint64_t number = next++;
  std::memcpy(id->internal, &number, sizeof number);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  std::shared_ptr<Clique> clique;
  {
    const std::lock_guard lock(registry().mutex);
    std::erase_if(registry().cliques, [](const auto& entry) { return entry.second.expired(); });
    auto& slot = registry().cliques[std::string(id.internal, sizeof id.internal)];
    clique = slot.lock();
    if (!clique) slot = clique = std::make_shared<Clique>(size);
    ++registry().counts.made_by_id;
  }
  if (clique->size != size || rank < 0 || rank >= size) return ncclInvalidArgument;
  auto member = std::make_shared<Member>();
  member->clique = clique;
  member->rank = rank;
  member->blocking = config == nullptr || config->blocking != 0;
  member->polls = 2;
  cudaGetDevice(&member->device);
  *comm = new ncclComm{member};
  Lock lock(clique->mutex);
  ++clique->joined;
  clique->changed.notify_all();
  if (!member->blocking) return ncclInProgress;
  clique->changed.wait(lock, [&] { return clique->joined == size; });
  member->joined = true;
  return ncclSuccess;
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* made, ncclConfig_t* config) {
  Member& member = *comm->member;
  Clique& clique = *member.clique;
  const Lock lock(clique.mutex);
  if (!member.joined || member.finalizing || member.splitting || member.executed < member.issued)
    return ncclInvalidUsage;
  if (color < NCCL_SPLIT_NOCOLOR || made == nullptr || config == nullptr || member.blocking) {
    return ncclInvalidArgument;  // what Tessera does not use is not emulated
  }
  auto& slot = clique.splits[member.splits];
  if (!slot) slot = std::make_shared<Split>();
  slot->wishes[member.rank] = {color, key, config->blocking != 0};
  member.splitting = slot;
  member.split_target = made;
  member.polls = 2;
  *made = nullptr;
  if (static_cast<int>(slot->wishes.size()) == clique.size) {
    divide(*slot);
    clique.splits.erase(member.splits);
  }
  ++member.splits;
  return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  Member& member = *comm->member;
  {
    const std::lock_guard lock(registry().mutex);
    const auto planted = registry().planted.find(member.device);
    if (planted != registry().planted.end() && planted->second != ncclSuccess) {
      *error = planted->second;
      return ncclSuccess;
    }
  }
  const Lock lock(member.clique->mutex);
  *error = ncclInProgress;
  const bool all_here =
      member.clique->joined >= member.clique->size && (member.splitting == nullptr || member.splitting->done);
  if (!all_here || (member.finalizing && member.executed < member.issued) || member.polls-- > 0)
    return ncclSuccess;
  member.polls = 0;
  member.joined = true;
  if (member.background) {
    std::exchange(member.background, nullptr)();
  }
  if (const auto split = std::exchange(member.splitting, nullptr)) {
    const auto made = split->made.find(member.rank);
    if (made != split->made.end()) {
      made->second->device = member.device;
      *member.split_target = new ncclComm{made->second};
      const std::lock_guard counts(registry().mutex);
      ++registry().counts.made_by_split;
    }
  }
  *error = member.error;
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  const Lock lock(comm->member->clique->mutex);
  comm->member->finalizing = true;
  comm->member->polls = 1;
  return ncclInProgress;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  look_for_graphs(*comm->member);
  delete comm;
  return ncclSuccess;
}

/// Ends this rank's side only, as NCCL does.
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  look_for_graphs(*comm->member);
  {
    Member& member = *comm->member;
    const Lock lock(member.clique->mutex);
    member.aborted = true;
    for (auto& [ends, queue] : member.clique->offers) {
      if (ends.first == member.rank) queue.clear();
    }
    for (auto& [number, round] : member.clique->rounds) round->calls.erase(member.rank);
    member.clique->changed.notify_all();
  }
  delete comm;
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  ++depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (--depth > 0) return ncclSuccess;
  const auto calls = std::exchange(grouped, {});
  std::vector<std::pair<MemberPtr, std::vector<Call>>> by_member;
  for (const auto& [member, call] : calls) {
    const auto known = std::find_if(by_member.begin(), by_member.end(),
                                    [&m = member](const auto& each) { return each.first == m; });
    if (known == by_member.end()) {
      by_member.push_back({member, {call}});
    } else {
      known->second.push_back(call);
    }
  }
  ncclResult_t result = ncclSuccess;
  const bool starts_thread =
      std::any_of(by_member.begin(), by_member.end(), [](const auto& each) { return !each.first->blocking; });
  if (!by_member.empty()) {
    const std::lock_guard lock(registry().mutex);
    ++registry().counts.groups;
    if (starts_thread) ++registry().counts.threads;
  }
  for (auto& [member, of_member] : by_member) {
    const ncclResult_t issued = issue(member, std::move(of_member));
    if (result == ncclSuccess || result == ncclInProgress) result = issued == ncclSuccess ? result : issued;
  }
  return result;
}

ncclResult_t ncclAllReduce(const void* in, void* out, std::size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return add(comm, {Call::Kind::all_reduce, in, out, count, type, op, -1, stream});
}

ncclResult_t ncclReduce(const void* in, void* out, std::size_t count, ncclDataType_t type, ncclRedOp_t op,
                        int root, ncclComm_t comm, cudaStream_t stream) {
  return add(comm, {Call::Kind::reduce, in, out, count, type, op, root, stream});
}

ncclResult_t ncclReduceScatter(const void* in, void* out, std::size_t out_count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return add(comm, {Call::Kind::reduce_scatter, in, out, out_count, type, op, -1, stream});
}

ncclResult_t ncclAllGather(const void* in, void* out, std::size_t in_count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return add(comm, {Call::Kind::all_gather, in, out, in_count, type, ncclSum, -1, stream});
}

ncclResult_t ncclBroadcast(const void* in, void* out, std::size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return add(comm, {Call::Kind::broadcast, in, out, count, type, ncclSum, root, stream});
}

ncclResult_t ncclSend(const void* in, std::size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return add(comm, {Call::Kind::send, in, nullptr, count, type, ncclSum, peer, stream});
}

ncclResult_t ncclRecv(void* out, std::size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return add(comm, {Call::Kind::recv, nullptr, out, count, type, ncclSum, peer, stream});
}
