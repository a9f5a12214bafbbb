#pragma once
/// The collectives over a Gloo fabric. Every rank sends each other rank its part directly; sums are made by
/// the receiver, in rank order, piece by piece as the parts come in.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "comm/gloo_fabric.hpp"

namespace tessera {

/// What the messages of one collective have in common.
class GlooCollective {
 public:
  /// `scratch` holds what others sent until it is added; it grows and is used again.
  GlooCollective(GlooFabric& fabric, std::shared_ptr<const GlooGroup> group, int rank, const GlooCall& call,
                 double timeout_s, std::vector<std::byte>& scratch)
      : fabric_(fabric),
        group_(std::move(group)),
        rank_(rank),
        call_(call),
        timeout_s_(timeout_s),
        scratch_(scratch) {}

  /// Tensors as in Communicator; counts are elements.
  void all_reduce(const Tensor& x, ReduceOp op);
  void reduce_scatter(const Tensor& in, const Tensor& out, std::span<const std::int64_t> counts, ReduceOp op);
  void all_gather(const Tensor& in, const Tensor& out, std::span<const std::int64_t> counts);
  void broadcast(const Tensor& x, int root);
  void all_to_all(const Tensor& in, const Tensor& out, std::span<const std::int64_t> send_counts,
                  std::span<const std::int64_t> recv_counts);
  void barrier();
  /// Every rank's text, in rank order.
  std::vector<std::string> gather_texts(const std::string& own);

 private:
  enum class Phase : std::uint64_t { reduce = 1, gather, other, text_length, text };
  using Messages = std::vector<GlooMessage>;

  int size() const { return static_cast<int>(group_->ranks.size()); }
  /// The others, beginning with the next rank, so that not all begin with the same.
  std::vector<int> peers() const;
  GlooMessage post(GlooMessage::Kind kind, Phase phase, int peer, std::int64_t piece, std::byte* data,
                   std::size_t bytes);
  void wait(Messages& messages);
  /// Reduces the own block of `in` into `out`. `whole`: also sends each piece of the result to all others
  /// (all_reduce), whose pieces go to their places in `in`.
  void reduce(const Tensor& in, const Tensor& out, std::span<const std::int64_t> counts, ReduceOp op,
              bool whole);

  GlooFabric& fabric_;
  std::shared_ptr<const GlooGroup> group_;
  int rank_;
  GlooCall call_;
  double timeout_s_;
  std::vector<std::byte>& scratch_;
};

}  // namespace tessera
