#pragma once
#include <memory>

namespace tessera::kernels {

/// While it lives, OpenMP's threads of this process sleep almost as soon as they wait. Nothing in a build
/// without OpenMP.
class ShortWaits {
 public:
  ShortWaits();
  ~ShortWaits();
  ShortWaits(const ShortWaits&) = delete;
  ShortWaits& operator=(const ShortWaits&) = delete;

 private:
  struct Team;
  std::unique_ptr<Team> team_;
};

}  // namespace tessera::kernels
