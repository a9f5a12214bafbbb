#include "tessera/comm/mesh.hpp"

#include <algorithm>
#include <string>
#include <utility>

namespace tessera {
namespace {

/// One axis of the grid that groups are cut from: its size and the distance between neighbours.
struct Stride {
  int size = 1, step = 1;
  bool chosen = false;
};

bool contains(std::span<const Axis> axes, Axis axis) {
  return std::find(axes.begin(), axes.end(), axis) != axes.end();
}

void check_shape(const MeshShape& shape) {
  for (const Axis axis : {Axis::tp, Axis::cp, Axis::ep, Axis::dp, Axis::pp}) {
    TESSERA_CHECK(shape.along(axis) >= 1, name_of(axis), " is ", shape.along(axis), "; it is 1 or more");
  }
  TESSERA_CHECK((shape.cp * shape.dp) % shape.ep == 0, "ep ", shape.ep, " does not divide cp ", shape.cp,
                " x dp ", shape.dp);
}

/// The first rank of every combination of the axes that are chosen (or not): the first axis fastest.
std::vector<int> combinations(const std::vector<Stride>& grid, bool chosen) {
  std::vector<int> ranks{0};
  for (const Stride& axis : grid) {
    if (axis.chosen != chosen) continue;
    std::vector<int> more;
    for (int i = 0; i < axis.size; ++i) {
      for (const int rank : ranks) more.push_back(rank + i * axis.step);
    }
    ranks = std::move(more);
  }
  return ranks;
}

}  // namespace

std::string_view name_of(Axis axis) {
  constexpr std::array<std::string_view, 6> kNames{"tp", "cp", "ep", "edp", "dp", "pp"};
  return kNames.at(static_cast<std::size_t>(axis));
}

int MeshShape::along(Axis axis) const {
  return std::array{tp, cp, ep, edp(), dp, pp}.at(static_cast<std::size_t>(axis));
}

int MeshCoordinates::along(Axis axis) const {
  return std::array{tp, cp, ep, edp, dp, pp}.at(static_cast<std::size_t>(axis));
}

MeshCoordinates coordinates_of(const MeshShape& shape, int rank) {
  check_shape(shape);
  TESSERA_CHECK(rank >= 0 && rank < shape.world(), "rank ", rank, " of a mesh of ", shape.world());
  MeshCoordinates at;
  at.tp = rank % shape.tp;
  const int row = rank / shape.tp;  // cp, dp, pp
  at.cp = row % shape.cp;
  at.dp = row / shape.cp % shape.dp;
  at.pp = row / (shape.cp * shape.dp);
  at.ep = row % shape.replicas() % shape.ep;
  at.edp = row % shape.replicas() / shape.ep;
  return at;
}

int rank_of(const MeshShape& shape, const MeshCoordinates& at) {
  check_shape(shape);
  for (const Axis axis : {Axis::tp, Axis::cp, Axis::dp, Axis::pp}) {
    TESSERA_CHECK(at.along(axis) >= 0 && at.along(axis) < shape.along(axis), "coordinate ", at.along(axis),
                  " on axis ", name_of(axis), " of ", shape.along(axis));
  }
  return at.tp + shape.tp * (at.cp + shape.cp * (at.dp + shape.dp * at.pp));
}

std::vector<std::vector<int>> rank_groups(const MeshShape& shape, std::span<const Axis> axes) {
  check_shape(shape);
  const bool expert = contains(axes, Axis::ep) || contains(axes, Axis::edp);
  TESSERA_CHECK(!expert || !(contains(axes, Axis::cp) || contains(axes, Axis::dp)),
                "groups along ep or edp and along cp or dp are cut from the same ranks; choose one");
  const int rows = shape.cp * shape.dp;
  std::vector<Stride> grid{{shape.tp, 1, contains(axes, Axis::tp)}};
  if (expert) {
    grid.push_back({shape.ep, shape.tp, contains(axes, Axis::ep)});
    grid.push_back({shape.edp(), shape.tp * shape.ep, contains(axes, Axis::edp)});
  } else {
    grid.push_back({shape.cp, shape.tp, contains(axes, Axis::cp)});
    grid.push_back({shape.dp, shape.tp * shape.cp, contains(axes, Axis::dp)});
  }
  grid.push_back({shape.pp, shape.tp * rows, contains(axes, Axis::pp)});

  std::vector<std::vector<int>> groups;
  const std::vector<int> members = combinations(grid, true);
  for (const int first : combinations(grid, false)) {
    groups.push_back(members);
    for (int& rank : groups.back()) rank += first;
  }
  return groups;
}

ProcessMesh::ProcessMesh(std::shared_ptr<Communicator> world, const MeshShape& shape)
    : shape_(shape), world_(std::move(world)) {
  check_shape(shape);
  TESSERA_CHECK(world_->size() == shape.world(), "a mesh of tp ", shape.tp, " x cp ", shape.cp, " x dp ",
                shape.dp, " x pp ", shape.pp, " has ", shape.world(), " ranks, group ", world_->name(),
                " has ", world_->size());
  const int rank = world_->rank();
  coordinates_ = coordinates_of(shape, rank);
  make_groups();
  if (shape.pp > 1) {
    // Stages exchange messages with their neighbours, the last one with the first where pieces are
    // interleaved.
    const int at = coordinates_.pp, size = shape.pp;
    std::vector<int> neighbours{(at + 1) % size};
    if (size > 2) neighbours.push_back((at + size - 1) % size);
    (*this)[Axis::pp].connect_to(neighbours);
    const bool holds = coordinates_.pp == 0 || coordinates_.pp == shape.pp - 1;
    embedding_ = world_->split(holds ? rank % (shape.world() / shape.pp) : -1, rank, "embedding");
  }
  if (!embedding_) embedding_ = make_self_communicator("embedding", world_->options());
}

std::shared_ptr<ProcessMesh> ProcessMesh::self() {
  return std::make_shared<ProcessMesh>(make_self_communicator("world"), MeshShape{});
}

std::shared_ptr<ProcessMesh> ProcessMesh::alone(const MeshShape& shape, int rank) {
  const auto group = [](int at, int size, const std::string& name) {
    return size == 1 ? make_self_communicator(name) : make_absent_communicator(at, size, name);
  };
  const std::shared_ptr<ProcessMesh> mesh(new ProcessMesh);
  mesh->shape_ = shape;
  mesh->coordinates_ = coordinates_of(shape, rank);
  mesh->world_ = group(rank, shape.world(), "world");
  const MeshCoordinates& at = mesh->coordinates_;
  mesh->alone_ = true;
  mesh->make_groups();
  const bool holds = shape.pp > 1 && (at.pp == 0 || at.pp == shape.pp - 1);
  mesh->embedding_ = group(holds && at.pp > 0 ? 1 : 0, holds ? 2 : 1, "embedding");
  mesh->tp_blocks_.resize(static_cast<std::size_t>(shape.tp));
  for (int copies = 2; copies < shape.tp; ++copies) {
    if (shape.tp % copies == 0)
      mesh->tp_blocks_[static_cast<std::size_t>(copies)] = group(at.tp % copies, copies, "tp_block");
  }
  return mesh;
}

Communicator& ProcessMesh::operator[](Axis axis) const { return *axes_.at(static_cast<std::size_t>(axis)); }

void ProcessMesh::make_groups() {
  for (const Axis axis : {Axis::tp, Axis::cp, Axis::ep, Axis::dp, Axis::pp}) {
    axes_.at(static_cast<std::size_t>(axis)) = make_group(std::array{axis});
  }
  // Also where dp is 1: sums of gradients do not wait for what passes exchange along cp.
  replicas_ = shape_.cp > 1 ? make_group(std::array{Axis::dp, Axis::cp})
                            : axes_.at(static_cast<std::size_t>(Axis::dp));
  axes_.at(static_cast<std::size_t>(Axis::edp)) =
      shape_.ep > 1 ? make_group(std::array{Axis::edp}) : replicas_;
}

std::shared_ptr<Communicator> ProcessMesh::make_group(std::span<const Axis> axes) const {
  std::string name;
  for (const Axis axis : axes) {
    if (!name.empty()) name += '-';
    name += name_of(axis);
  }
  const auto groups = rank_groups(shape_, axes);
  for (std::size_t color = 0; color < groups.size(); ++color) {
    const std::vector<int>& members = groups[color];
    const auto place = std::find(members.begin(), members.end(), rank());
    if (place == members.end()) continue;
    if (members.size() == 1) return make_self_communicator(name, world_->options());
    const auto at = static_cast<int>(place - members.begin()), size = static_cast<int>(members.size());
    if (alone_) return make_absent_communicator(at, size, name);
    // Every group holds its ranks in the world's order, so the rank is the key.
    return world_->split(static_cast<int>(color), rank(), name);
  }
  throw InternalError(detail::concat("rank ", rank(), " is in no group along ", name));
}

Communicator& ProcessMesh::group(std::span<const Axis> axes) {
  std::vector<Axis> several;
  for (const Axis axis : {Axis::tp, Axis::cp, Axis::ep, Axis::edp, Axis::dp, Axis::pp}) {
    if (contains(axes, axis) && shape_.along(axis) > 1) several.push_back(axis);
  }
  TESSERA_CHECK(!axes.empty(), "a group along no axis");
  if (several.empty()) return (*this)[axes.front()];
  if (several.size() == 1) return (*this)[several.front()];
  auto& communicator = groups_[several];
  if (!communicator) communicator = make_group(several);
  return *communicator;
}

const ProcessMesh::DataGroups& ProcessMesh::share_data(int size, bool gathers) {
  Communicator& all = *replicas_;
  TESSERA_ENSURE(ConfigError, size >= 1 && all.size() % size == 0, "parallel.zero_group (", size,
                 ") does not divide the ", all.size(), " data ranks");
  if (shared_ == std::pair(size, gathers)) return data_groups_;
  data_groups_ = {};
  const auto part = [&](Communicator& of, int color, int at, int count, const char* name) {
    if (count == 1) return make_self_communicator(name, world_->options());
    return alone_ ? make_absent_communicator(at, count, name) : of.split(color, at, name);
  };
  if (size < all.size()) {
    data_groups_.shard = part(all, all.rank() / size, all.rank() % size, size, "dp_shard");
    data_groups_.copy = part(all, all.rank() % size, all.rank() / size, all.size() / size, "dp_copy");
  }
  Communicator& shard = data_groups_.shard ? *data_groups_.shard : all;
  if (gathers) data_groups_.gather = part(shard, 0, shard.rank(), shard.size(), "dp_gather");
  Communicator& experts = (*this)[Axis::edp];
  if (gathers && shape_.ep > 1)
    data_groups_.expert_gather = part(experts, 0, experts.rank(), experts.size(), "edp_gather");
  shared_ = {size, gathers};
  return data_groups_;
}

Communicator& ProcessMesh::tp_block(int copies) {
  TESSERA_CHECK(copies >= 1 && shape_.tp % copies == 0, "blocks of ", copies, " of ", shape_.tp, " tp ranks");
  const auto& tp = axes_.at(static_cast<std::size_t>(Axis::tp));
  if (copies == shape_.tp) return *tp;
  tp_blocks_.resize(static_cast<std::size_t>(shape_.tp));
  auto& block = tp_blocks_[static_cast<std::size_t>(copies)];
  if (!block) {
    block = copies == 1 ? make_self_communicator("tp_block", world_->options())
                        : tp->split(coordinates_.tp / copies, coordinates_.tp, "tp_block");
  }
  return *block;
}

}  // namespace tessera
