#include "comm/gloo_collectives.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "comm/reduce.hpp"
#include "tessera/base/error.hpp"
#include "tessera/comm/placement.hpp"

namespace tessera {

namespace {

using Kind = GlooMessage::Kind;

/// Memory for what others sent and is not added yet: two pieces from each of them.
constexpr std::size_t kScratchBytes = std::size_t{32} << 20;
constexpr std::size_t kLargestPiece = std::size_t{4} << 20;
constexpr std::size_t kSmallestPiece = std::size_t{64} << 10;

/// Elements of a piece; every rank computes the same.
std::int64_t piece_length(int ranks, std::size_t element) {
  const std::size_t share = kScratchBytes / 2 / static_cast<std::size_t>(ranks - 1);
  return static_cast<std::int64_t>(std::clamp(share, kSmallestPiece, kLargestPiece) / element);
}

std::vector<std::int64_t> starts_of(std::span<const std::int64_t> counts) {
  std::vector<std::int64_t> starts{0};
  for (const std::int64_t count : counts) starts.push_back(starts.back() + count);
  return starts;
}

}  // namespace

std::vector<int> GlooCollective::peers() const {
  std::vector<int> others;
  for (int i = 1; i < size(); ++i) others.push_back((rank_ + i) % size());
  return others;
}

GlooMessage GlooCollective::post(Kind kind, Phase phase, int peer, std::int64_t piece, std::byte* data,
                                 std::size_t bytes) {
  const std::uint64_t slot = gloo_slot({group_->id, static_cast<std::uint64_t>(phase), call_.sequence,
                                        static_cast<std::uint64_t>(piece), bytes});
  return fabric_.post(kind, group_->ranks[static_cast<std::size_t>(peer)], slot, data, bytes, group_, call_);
}

void GlooCollective::wait(Messages& messages) {
  for (GlooMessage& message : messages) fabric_.wait(message, group_, call_, timeout_s_);
  messages.clear();
}

void GlooCollective::reduce(const Tensor& in, const Tensor& out, std::span<const std::int64_t> counts,
                            ReduceOp op, bool whole) {
  const std::size_t element = size_of(in.dtype());
  const std::int64_t length = piece_length(size(), element);
  const std::vector<std::int64_t> starts = starts_of(counts);
  const std::vector<int> others = peers();
  const std::int64_t own_start = starts[static_cast<std::size_t>(rank_)];
  const std::int64_t own_count = counts[static_cast<std::size_t>(rank_)];

  // A rank can return piece k of its block only after it has got our part of that piece, so the result may be
  // received into memory that is still being sent from.
  Messages background;
  for (const int peer : others) {
    const std::int64_t begin = starts[static_cast<std::size_t>(peer)];
    const std::int64_t count = counts[static_cast<std::size_t>(peer)];
    for (std::int64_t done = 0, piece = 0; done < count; done += length, ++piece) {
      const std::size_t bytes = static_cast<std::size_t>(std::min(length, count - done)) * element;
      std::byte* const data = at(in, begin + done);
      if (whole) background.push_back(post(Kind::recv, Phase::gather, peer, piece, data, bytes));
      background.push_back(post(Kind::send, Phase::reduce, peer, piece, data, bytes));
    }
  }

  const std::size_t stride = (static_cast<std::size_t>(std::min(length, own_count)) * element + 63) / 64 * 64;
  if (scratch_.size() < 2 * stride * others.size()) scratch_.resize(2 * stride * others.size());
  const auto buffer_of = [&](std::int64_t piece, int peer) {
    const int place = (peer - rank_ - 1 + size()) % size();
    return scratch_.data() +
           stride * (static_cast<std::size_t>(piece % 2) * others.size() + static_cast<std::size_t>(place));
  };
  const auto piece_count = [&](std::int64_t piece) { return std::min(length, own_count - piece * length); };
  std::array<Messages, 2> incoming;
  const auto receive = [&](std::int64_t piece) {
    if (piece * length >= own_count) return;
    for (const int peer : others) {
      incoming[static_cast<std::size_t>(piece % 2)].push_back(
          post(Kind::recv, Phase::reduce, peer, piece, buffer_of(piece, peer),
               static_cast<std::size_t>(piece_count(piece)) * element));
    }
  };
  receive(0);
  std::vector<const void*> sources(static_cast<std::size_t>(size()));
  for (std::int64_t piece = 0; piece * length < own_count; ++piece) {
    receive(piece + 1);
    wait(incoming[static_cast<std::size_t>(piece % 2)]);
    for (const int peer : others) sources[static_cast<std::size_t>(peer)] = buffer_of(piece, peer);
    sources[static_cast<std::size_t>(rank_)] = at(in, own_start + piece * length);
    void* const target = at(out, piece * length);
    reduce_in_order(in.dtype(), op, sources, {&target, 1}, piece_count(piece));
    if (!whole) continue;
    for (const int peer : others) {
      background.push_back(post(Kind::send, Phase::gather, peer, piece, at(out, piece * length),
                                static_cast<std::size_t>(piece_count(piece)) * element));
    }
  }
  wait(background);
}

void GlooCollective::all_reduce(const Tensor& x, ReduceOp op) {
  std::vector<std::int64_t> counts;
  for (int r = 0; r < size(); ++r) counts.push_back(part_of(x.numel(), r, size()).count);
  const Part own = part_of(x.numel(), rank_, size());
  reduce(x, x.view({x.numel()}).narrow(0, own.begin, own.count), counts, op, true);
}

void GlooCollective::reduce_scatter(const Tensor& in, const Tensor& out, std::span<const std::int64_t> counts,
                                    ReduceOp op) {
  reduce(in, out, counts, op, false);
}

void GlooCollective::all_gather(const Tensor& in, const Tensor& out, std::span<const std::int64_t> counts) {
  const std::vector<std::int64_t> starts = starts_of(counts);
  Messages messages;
  for (const int peer : peers()) {
    const std::size_t bytes =
        static_cast<std::size_t>(counts[static_cast<std::size_t>(peer)]) * size_of(out.dtype());
    std::byte* const place = at(out, starts[static_cast<std::size_t>(peer)]);
    if (bytes > 0) messages.push_back(post(Kind::recv, Phase::gather, peer, 0, place, bytes));
    if (in.nbytes() > 0) messages.push_back(post(Kind::send, Phase::gather, peer, 0, at(in, 0), in.nbytes()));
  }
  std::byte* const own = at(out, starts[static_cast<std::size_t>(rank_)]);
  if (in.nbytes() > 0 && own != in.raw()) std::memcpy(own, in.raw(), in.nbytes());
  wait(messages);
}

void GlooCollective::broadcast(const Tensor& x, int root) {
  Messages messages;
  if (x.nbytes() > 0 && rank_ == root) {
    for (const int peer : peers())
      messages.push_back(post(Kind::send, Phase::other, peer, 0, at(x, 0), x.nbytes()));
  } else if (x.nbytes() > 0) {
    messages.push_back(post(Kind::recv, Phase::other, root, 0, at(x, 0), x.nbytes()));
  }
  wait(messages);
}

void GlooCollective::all_to_all(const Tensor& in, const Tensor& out,
                                std::span<const std::int64_t> send_counts,
                                std::span<const std::int64_t> recv_counts) {
  const std::size_t element = size_of(in.dtype());
  const std::vector<std::int64_t> from = starts_of(send_counts), to = starts_of(recv_counts);
  Messages messages;
  for (const int peer : peers()) {
    const auto p = static_cast<std::size_t>(peer);
    const std::size_t incoming = static_cast<std::size_t>(recv_counts[p]) * element;
    const std::size_t outgoing = static_cast<std::size_t>(send_counts[p]) * element;
    if (incoming > 0) messages.push_back(post(Kind::recv, Phase::other, peer, 0, at(out, to[p]), incoming));
    if (outgoing > 0) messages.push_back(post(Kind::send, Phase::other, peer, 0, at(in, from[p]), outgoing));
  }
  const auto own = static_cast<std::size_t>(rank_);
  const std::size_t bytes = static_cast<std::size_t>(send_counts[own]) * element;
  if (bytes > 0) std::memcpy(at(out, to[own]), at(in, from[own]), bytes);
  wait(messages);
}

void GlooCollective::barrier() {
  Messages messages;
  for (const int peer : peers()) {
    messages.push_back(post(Kind::recv, Phase::other, peer, 0, nullptr, 0));
    messages.push_back(post(Kind::send, Phase::other, peer, 0, nullptr, 0));
  }
  wait(messages);
}

std::vector<std::string> GlooCollective::gather_texts(const std::string& own) {
  constexpr std::uint64_t kLongest = std::uint64_t{1} << 24;
  std::vector<std::uint64_t> lengths(static_cast<std::size_t>(size()));
  lengths[static_cast<std::size_t>(rank_)] = own.size();
  std::vector<std::string> texts(static_cast<std::size_t>(size()));
  Messages messages;  // destroyed before the memory they use
  const auto length_of = [&](int rank) {
    return reinterpret_cast<std::byte*>(&lengths[static_cast<std::size_t>(rank)]);
  };
  for (const int peer : peers()) {
    messages.push_back(post(Kind::recv, Phase::text_length, peer, 0, length_of(peer), sizeof(std::uint64_t)));
    messages.push_back(
        post(Kind::send, Phase::text_length, peer, 0, length_of(rank_), sizeof(std::uint64_t)));
  }
  wait(messages);
  texts[static_cast<std::size_t>(rank_)] = own;
  const auto text_of = [&](int rank) {
    return reinterpret_cast<std::byte*>(texts[static_cast<std::size_t>(rank)].data());
  };
  for (const int peer : peers()) {
    const std::uint64_t length = lengths[static_cast<std::size_t>(peer)];
    TESSERA_ENSURE(CommunicationError, length <= kLongest, "rank ", peer, " announces a text of ", length,
                   " bytes");
    texts[static_cast<std::size_t>(peer)].resize(length);
    messages.push_back(post(Kind::recv, Phase::text, peer, 0, text_of(peer), length));
    messages.push_back(post(Kind::send, Phase::text, peer, 0, text_of(rank_), own.size()));
  }
  wait(messages);
  return texts;
}

}  // namespace tessera
