#include "engine/traffic.hpp"

namespace tessera {

TrafficSpan::TrafficSpan(const ProcessMesh& mesh, std::vector<AxisTraffic>& into)
    : mesh_(mesh), into_(into), before_(so_far()) {}

TrafficSpan::~TrafficSpan() {
  const std::vector<AxisTraffic> now = so_far();
  for (std::size_t i = 0; i < now.size(); ++i) {
    if (i == into_.size()) into_.push_back({now[i].axis});
    // A group that came into being meanwhile had nothing before.
    const AxisTraffic before = i < before_.size() ? before_[i] : AxisTraffic{};
    into_[i].bytes_sent += now[i].bytes_sent - before.bytes_sent;
    into_[i].wait_s += now[i].wait_s - before.wait_s;
  }
}

std::vector<AxisTraffic> TrafficSpan::so_far() const {
  if (mesh_.world().size() == 1) return {};
  std::vector<AxisTraffic> list;
  const auto add = [&](const char* axis, const Communicator& group) {
    const CommStats stats = group.stats();
    list.push_back({axis, stats.bytes_sent, stats.wait_s});
  };
  add("tp", mesh_[Axis::tp]);
  if (mesh_.shape().cp > 1) add("cp", mesh_[Axis::cp]);
  add(mesh_.replicas().name().c_str(), mesh_.replicas());
  if (mesh_.shape().ep > 1) {
    add("ep", mesh_[Axis::ep]);
    add("edp", mesh_[Axis::edp]);
  }
  const auto& [shard, copy, gather, expert_gather] = mesh_.data_groups();
  for (const auto& group : {shard, copy, gather, expert_gather}) {
    if (group && group->size() > 1) add(group->name().c_str(), *group);
  }
  add("pp", mesh_[Axis::pp]);
  add("embedding", mesh_.embedding());
  add("world", mesh_.world());
  for (const auto& block : mesh_.tp_blocks()) {
    if (block) add("tp_block", *block);
  }
  return list;
}

}  // namespace tessera
