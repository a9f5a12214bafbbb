#pragma once
/// Decoding passes on a GPU that holds the whole model.

#include <memory>
#include <string>
#include <vector>

#include "engine/generation/lane.hpp"
#include "tessera/base/config_words.hpp"
#include "tessera/device/graph.hpp"
#include "tessera/ops/sampling.hpp"

namespace tessera::generation {

/// Tokens are drawn where the logits are and are the next pass's input there, as are positions and lengths.
/// So a pass is one CUDA graph, launched again for every token as it was recorded; it is recorded anew when
/// texts enter or leave and when they have grown by 256 positions. The host reads a token, 12 bytes of each
/// text, while the next pass runs already.
class DeviceDecoder {
 public:
  /// `model` must outlive it. `graphs`: device.cuda_graph; automatic is without where a pass cannot be
  /// recorded.
  DeviceDecoder(const ExecCtx& ctx, Model& model, AutoSwitch graphs);

  /// Whether it computes the next token of the lane's texts: each is drawn, and a decoder's.
  bool serves(const Lane& lane) const;
  /// Positions that the lane has room for behind each text: the next token's and that of the pass ahead.
  static constexpr std::int64_t kRoom = 2;
  /// Computes it. In the order of the units. Errors: InvalidArgument for logits
  /// that are not finite, no token left; DeviceError.
  std::vector<DrawnToken> next(Lane& lane);
  StreamGraph::Stats stats() const { return graph_.stats(); }

 private:
  /// A text before a pass.
  struct Place {
    std::int64_t prompt, sample, length;
    bool operator==(const Place&) const = default;
  };
  /// What the host reads of a pass.
  struct Result {
    std::shared_ptr<void> memory;  ///< pinned
    Event ready;
  };

  std::vector<Place> places(const Lane& lane) const;
  /// Puts the texts' state on the device.
  void load(const Lane& lane);
  void load_bits(const std::vector<const Unit*>& units);
  /// Launches the pass that computes the token `ahead` of the next one.
  void launch(Lane& lane, std::int64_t ahead);
  void compute(Lane& lane, std::int64_t ahead, std::int64_t extent);
  std::vector<DrawnToken> read(Result& result, std::size_t count) const;

  /// Its allocator is its own: a graph's memory is nobody else's between two launches.
  ExecCtx ctx_;
  Model& model_;
  AutoSwitch graphs_;
  StreamGraph graph_;
  ops::SamplingState all_, used_;  ///< of as many texts as the lane has room for, and of those that are there
  Result results_[2];              ///< of every other pass
  std::size_t passes_ = 0;
  bool ahead_ = false;  ///< the next token's pass was launched
  std::vector<Place> expected_;
  std::uint64_t cache_ = 0;  ///< Lane::cache_number() of what was launched
};

}  // namespace tessera::generation
