#include "tessera/comm/bytes.hpp"

#include <numeric>

namespace tessera {

// The memory belongs to the tensors: an operation that others still work on outlives a rank that gave up.

std::vector<std::string> all_gather_bytes(Communicator& group, std::string_view own,
                                          const Communicator::Where& where) {
  const ExecCtx ctx = ExecCtx::cpu(1);
  const auto own_length = static_cast<std::int64_t>(own.size());
  const Tensor lengths = Tensor::empty(ctx, {group.size()}, DType::i64);
  const Tensor length = lengths.narrow(0, group.rank(), 1);
  length.copy_from_host(&own_length);
  group.all_gather(ctx, length, lengths, {}, where).wait(ctx);

  const auto counts = lengths.to_vector<std::int64_t>();
  const std::int64_t before = std::accumulate(counts.begin(), counts.begin() + group.rank(), std::int64_t{0});
  const std::int64_t total = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  const Tensor all = Tensor::empty(ctx, {total}, DType::u8);
  const Tensor part = all.narrow(0, before, own_length);
  part.copy_from_host(own.data());
  group.all_gather(ctx, part, all, counts, where).wait(ctx);

  std::vector<std::string> list;
  const char* next = static_cast<const char*>(all.raw());
  for (const std::int64_t count : counts) {
    list.emplace_back(next, static_cast<std::size_t>(count));
    next += count;
  }
  return list;
}

std::string broadcast_bytes(Communicator& group, std::string_view bytes, int root,
                            const Communicator::Where& where) {
  const ExecCtx ctx = ExecCtx::cpu(1);
  const Tensor length =
      Tensor::from(ctx, std::vector<std::int64_t>{static_cast<std::int64_t>(bytes.size())}, {1});
  group.broadcast(ctx, length, root, where).wait(ctx);
  const std::int64_t count = length.to_vector<std::int64_t>()[0];
  if (count == 0) return {};
  const Tensor text = Tensor::empty(ctx, {count}, DType::u8);
  if (group.rank() == root) text.copy_from_host(bytes.data());
  group.broadcast(ctx, text, root, where).wait(ctx);
  return {static_cast<const char*>(text.raw()), static_cast<std::size_t>(count)};
}

}  // namespace tessera
