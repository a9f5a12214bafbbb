#pragma once
/// Work of a stream that is launched as one CUDA graph, so that the GPU need not wait for the host between
/// kernels.

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>

#include "tessera/device/stream.hpp"

namespace tessera {

struct Recording;

/// Records the same stretch of work at every turn and launches it as one graph: what is recorded may differ
/// from turn to turn in sizes, addresses and numbers, which only replaces the graph's parameters. A graph of
/// another shape is made anew, once for every `key`.
class StreamGraph {
 public:
  struct Stats {
    std::uint64_t plain = 0;     ///< turns that were launched piece by piece
    std::uint64_t launched = 0;  ///< turns that were launched as a graph
    std::uint64_t replayed = 0;  ///< of these, without being recorded again
    std::uint64_t made = 0;      ///< graphs made for that; the others replaced parameters of one
    std::string refused_update =
        {};  ///< why the last graph could not replace the one before; empty if it could
  };

  /// Graphs kept, those used last: texts of ever new lengths make ever new ones.
  static constexpr std::size_t kMostGraphs = 10;

  explicit StreamGraph(std::shared_ptr<Stream> stream);
  ~StreamGraph();
  StreamGraph(const StreamGraph&) = delete;
  StreamGraph& operator=(const StreamGraph&) = delete;

  struct Options {
    /// Called when the graph is ready, before it is launched. Nothing that `work` launched runs if it throws.
    std::function<void()> before_launch = {};
    /// For replay(): what other streams had to do before they joined is waited for in front of the graph, not
    /// by the part of it that is theirs.
    bool lasting = false;
    /// Piece by piece, whatever is known: other ranks, whose calls are in it, have no graph yet.
    bool plain = false;
  };

  /// Calls `work`; what it launches on the stream, and on streams that wait for the stream's events
  /// meanwhile, becomes one graph, launched when it returns. `work` must not wait for the stream: events
  /// recorded in it are done when the graph is. A key's first turn is launched piece by piece, since then
  /// connections, plans and memory come into being; so is every turn on the CPU and while the stream has a
  /// trace. Errors: DeviceError; whatever `work` throws, then nothing it launched runs.
  void run(const std::string& key, const std::function<void()>& work, const Options& options);
  void run(const std::string& key, const std::function<void()>& work) { run(key, work, Options()); }
  /// Launches the key's graph once more as it was recorded last: for work that finds on the device all that
  /// changes, and whose memory still is its own. Returns false, with nothing launched, where there is no
  /// graph, where it copies from memory of the host or names events of work outside, which are another
  /// turn's, and while the stream has a trace: then run() does it. Errors: DeviceError.
  bool replay(const std::string& key);
  /// Whether replay() would launch it.
  bool can_replay(const std::string& key) const;
  /// Whether the key's first turn is over, and its graph not forgotten.
  bool knows(const std::string& key) const;
  const Stats& stats() const { return stats_; }

 private:
  struct Turns;
  using Owned = std::unique_ptr<void, void (*)(void*)>;
  void remember(const std::string& key);
  Owned finish(Recording& recording);
  void leave(const Recording& recording);
  void abandon(Recording& recording);
  void prepare(Turns& turns, const Owned& graph);
  void launch(Turns& turns, const std::shared_ptr<Recording>& recording);
  static std::shared_ptr<Recording> again(const Recording& recording);

  std::shared_ptr<Stream> stream_;
  std::list<Turns> turns_;  ///< most recently used first
  Stats stats_;
};

}  // namespace tessera
