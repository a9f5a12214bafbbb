#pragma once
#include <optional>
#include <string>

#include "launch/failure.hpp"
#include "tessera/launch/launch.hpp"

namespace tessera::launching {

/// Whether a job is started again after a failure. Every machine decides alike, from the job's outcome.
class Restarts {
 public:
  /// Attempts in a row that may come to nothing.
  static constexpr int kFruitless = 3;

  explicit Restarts(const LaunchOptions& options) : options_(options) {}

  /// After an attempt that failed: the seconds to wait before the next one; nullopt = there is none. Progress
  /// is a newer checkpoint, or more steps, than any attempt before.
  std::optional<double> next(const Outcome& outcome);
  int restarts() const { return restarts_; }
  /// The job's result after next() said nullopt.
  LaunchResult give_up(const Outcome& outcome) const;

 private:
  const LaunchOptions& options_;
  Progress furthest_;
  int restarts_ = 0, fruitless_ = 0;
};

}  // namespace tessera::launching
