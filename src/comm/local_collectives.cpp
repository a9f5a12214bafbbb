#include <cstring>

#include "comm/local.hpp"
#include "comm/reduce.hpp"

namespace tessera {
namespace {

using Calls = std::vector<LocalCollective::Call>;

/// Nothing where the two are one (operations in place).
void copy(std::byte* target, const std::byte* source, std::int64_t count, DType dtype) {
  if (count > 0 && target != source)
    std::memcpy(target, source, static_cast<std::size_t>(count) * size_of(dtype));
}

void all_reduce(const Calls& calls) {
  std::vector<const void*> sources;
  std::vector<void*> targets;
  for (const auto& call : calls) {
    sources.push_back(call.request.in.raw());
    targets.push_back(call.request.in.raw());
  }
  const auto& any = calls.front().request;
  reduce_in_order(any.in.dtype(), any.op, sources, targets, any.in.numel());
}

void reduce_scatter(const Calls& calls) {
  const auto& any = calls.front().request;
  std::int64_t begin = 0;
  for (std::size_t block = 0; block < calls.size(); ++block) {
    std::vector<const void*> sources;
    for (const auto& call : calls) sources.push_back(at(call.request.in, begin));
    void* const target = calls[block].request.out.raw();
    reduce_in_order(any.in.dtype(), any.op, sources, {&target, 1}, any.send_counts[block]);
    begin += any.send_counts[block];
  }
}

void all_gather(const Calls& calls) {
  const auto& any = calls.front().request;
  std::int64_t begin = 0;
  for (std::size_t block = 0; block < calls.size(); ++block) {
    const std::byte* source = at(calls[block].request.in, 0);
    for (const auto& call : calls)
      copy(at(call.request.out, begin), source, any.recv_counts[block], any.in.dtype());
    begin += any.recv_counts[block];
  }
}

void broadcast(const Calls& calls) {
  const Tensor& source = calls[static_cast<std::size_t>(calls.front().request.root)].request.in;
  for (const auto& call : calls) copy(at(call.request.in, 0), at(source, 0), source.numel(), source.dtype());
}

void all_to_all(const Calls& calls) {
  std::vector<std::int64_t> received(calls.size(), 0);  // elements each rank has got so far
  for (std::size_t from = 0; from < calls.size(); ++from) {
    const auto& sender = calls[from].request;
    std::int64_t begin = 0;
    for (std::size_t to = 0; to < calls.size(); ++to) {
      const std::int64_t count = sender.send_counts[to];
      copy(at(calls[to].request.out, received[to]), at(sender.in, begin), count, sender.in.dtype());
      begin += count;
      received[to] += count;
    }
  }
}

}  // namespace

void run_local_collective(const Calls& calls) {
  using Operation = LocalCommunicator::Operation;
  switch (calls.front().request.operation) {
    case Operation::all_reduce:
      return all_reduce(calls);
    case Operation::reduce_scatter:
      return reduce_scatter(calls);
    case Operation::all_gather:
      return all_gather(calls);
    case Operation::broadcast:
      return broadcast(calls);
    case Operation::all_to_all:
      return all_to_all(calls);
    case Operation::barrier:
    case Operation::split:
    case Operation::exchange:
      return;
  }
}

}  // namespace tessera
