#include "launch/restarts.hpp"

#include <algorithm>
#include <cmath>

#include "tessera/base/error.hpp"
#include "tessera/base/exit_codes.hpp"

namespace tessera::launching {

std::optional<double> Restarts::next(const Outcome& outcome) {
  const Progress& now = outcome.progress;
  const bool further = now.step > furthest_.step || now.saved > furthest_.saved;
  furthest_.join(now);
  fruitless_ = further ? 0 : fruitless_ + 1;
  if (restarts_ >= options_.max_restarts || fruitless_ >= kFruitless) return std::nullopt;
  ++restarts_;
  // What failed may need time to come back: a file system, a driver, a machine.
  return std::min(options_.restart_delay_s * std::exp2(std::min(restarts_ - 1, 30)),
                  options_.longest_restart_delay_s);
}

LaunchResult Restarts::give_up(const Outcome& outcome) const {
  LaunchResult result{outcome.code, outcome.report};
  if (restarts_ == 0) return result;
  if (restarts_ >= options_.max_restarts) {
    result.report +=
        detail::concat("\n(all ", restarts_, restarts_ == 1 ? " restart" : " restarts", " used up)");
    return result;
  }
  result.exit_code = exit_code::kNoProgress;
  result.report += detail::concat("\n(given up after ", restarts_, " of ", options_.max_restarts,
                                  " restarts: ", kFruitless, " attempts in a row got no further than ",
                                  furthest_.step > 0 ? detail::concat("step ", furthest_.step) : "the start",
                                  ", so the next would fail too)");
  return result;
}

}  // namespace tessera::launching
