#pragma once
#include <vector>

#include "tessera/comm/mesh.hpp"
#include "tessera/engine/engine.hpp"

namespace tessera {

/// Adds to `into` what this rank's groups send and wait for while this is there.
class TrafficSpan {
 public:
  TrafficSpan(const ProcessMesh& mesh, std::vector<AxisTraffic>& into);
  ~TrafficSpan();
  TrafficSpan(const TrafficSpan&) = delete;
  TrafficSpan& operator=(const TrafficSpan&) = delete;

 private:
  std::vector<AxisTraffic> so_far() const;

  const ProcessMesh& mesh_;
  std::vector<AxisTraffic>& into_;
  std::vector<AxisTraffic> before_;
};

}  // namespace tessera
