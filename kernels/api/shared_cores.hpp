#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "kernels/api/short_waits.hpp"

namespace tessera {

/// Whether other programs want the cores that a rank's threads run on, by the time that the thread which made
/// this waits for a core. While they do, OpenMP's threads sleep as soon as they wait (ShortWaits), and
/// whoever asks had better do small work alone: a thread that is not running holds up all others at a
/// barrier.
class SharedCores {
 public:
  SharedCores();
  /// Looks anew every 50 ms, which takes a few microseconds. From any thread. False where the system does not
  /// say.
  bool crowded();

  /// What `looked` seconds with `waited` seconds of waiting mean: cores are wanted by others when a tenth of
  /// the last quarter of a second or so went by waiting, and no more when it was almost nothing.
  class Verdict {
   public:
    bool after(double looked_s, double waited_s);

   private:
    bool crowded_ = false;
    double share_ = 0.0;  ///< of the time, looks long ago counting less
  };

 private:
  void look();

  const std::string file_;  ///< of the thread's times
  std::atomic<std::int64_t> next_look_ns_;
  std::atomic<bool> crowded_ = false;
  std::mutex mutex_;  ///< guards what follows
  double looked_s_ = 0, waited_s_ = 0;
  Verdict verdict_;
  std::unique_ptr<kernels::ShortWaits> short_waits_;
};

}  // namespace tessera
