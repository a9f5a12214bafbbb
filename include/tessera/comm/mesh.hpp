#pragma once
/// ProcessMesh: the ranks of a job as a grid with named axes, in Megatron's order (tp fastest, then cp, dp,
/// pp).

#include <array>
#include <initializer_list>
#include <map>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/comm/communicator.hpp"

namespace tessera {

enum class Axis { tp, cp, ep, edp, dp, pp };
std::string_view name_of(Axis axis);

/// Ranks along each axis. Expert-parallel groups (ep) are cut out of cp x dp, which ep divides; what is left
/// of it (edp) holds the same experts.
struct MeshShape {
  int tp = 1, cp = 1, ep = 1, dp = 1, pp = 1;
  int world() const { return tp * cp * dp * pp; }
  /// Ranks that hold the same part of the model.
  int replicas() const { return cp * dp; }
  int edp() const { return replicas() / ep; }
  int along(Axis axis) const;
  friend bool operator==(const MeshShape&, const MeshShape&) = default;
};

/// Where a rank is on the dense axes (ep, edp: its places in the groups for experts).
struct MeshCoordinates {
  int tp = 0, cp = 0, ep = 0, edp = 0, dp = 0, pp = 0;
  int along(Axis axis) const;
};
/// Errors: InvalidArgument if rank is not in [0, shape.world()).
MeshCoordinates coordinates_of(const MeshShape& shape, int rank);
int rank_of(const MeshShape& shape, const MeshCoordinates& coordinates);

/// All groups of ranks that differ only along `axes` (Megatron's "tp-dp" and so on): members with the chosen
/// axes in order, the first fastest; groups with the other axes in order. Errors: InvalidArgument for ep
/// or edp together with cp or dp.
std::vector<std::vector<int>> rank_groups(const MeshShape& shape, std::span<const Axis> axes);

class ProcessMesh {
 public:
  /// Collective over `world`, whose size must be shape.world(). Errors: InvalidArgument otherwise.
  ProcessMesh(std::shared_ptr<Communicator> world, const MeshShape& shape);
  /// One rank.
  static std::shared_ptr<ProcessMesh> self();
  /// Rank `rank` of a mesh whose other ranks are not there (make_absent_communicator): to see what that rank
  /// would compute.
  static std::shared_ptr<ProcessMesh> alone(const MeshShape& shape, int rank);

  const MeshShape& shape() const { return shape_; }
  const MeshCoordinates& coordinates() const { return coordinates_; }
  Communicator& world() const { return *world_; }
  /// Always a valid communicator; of one rank where the axis has size 1. Without expert ranks edp is
  /// replicas().
  Communicator& operator[](Axis axis) const;
  /// The ranks that differ along these axes only, in the world's order. The first call with several axes of
  /// more than one rank is collective over the world. Errors: InvalidArgument as rank_groups(), and for none.
  Communicator& group(std::span<const Axis> axes);
  Communicator& group(std::initializer_list<Axis> axes) {
    return group(std::span(axes.begin(), axes.size()));
  }
  /// The ranks along cp and dp, cp fastest, which hold the same part of the model: they add up its gradients,
  /// and share out what parallel.zero_stage says. Where cp is 1 it is that of dp.
  Communicator& replicas() const { return *replicas_; }
  /// First and last stage of this rank's pipeline: those that share a tied embedding. Of one rank for stages
  /// between them and where pp is 1.
  Communicator& embedding() const { return *embedding_; }
  /// Neighbours along tp, in blocks of `copies` ranks that hold the same key-value heads. copies divides tp.
  /// The first call with a value is collective over tp.
  Communicator& tp_block(int copies);
  /// Those asked for so far that are neither this rank alone nor all of tp; by copies, null where there is
  /// none.
  const std::vector<std::shared_ptr<Communicator>>& tp_blocks() const { return tp_blocks_; }
  /// How replicas share things out.
  struct DataGroups {
    std::shared_ptr<Communicator> shard;          ///< neighbours that have a share each
    std::shared_ptr<Communicator> copy;           ///< those with the same one
    std::shared_ptr<Communicator> gather;         ///< as `shard`, for what is gathered beside its collectives
    std::shared_ptr<Communicator> expert_gather;  ///< the same for edp; null without expert ranks
  };
  /// Makes groups of `size` neighbouring replicas (shard and copy are null where that is all of them);
  /// `gathers`: also those that gather. Collective over replicas(), but for a call like the last one, whose
  /// groups it returns; another one ends these. Errors: ConfigError unless `size` divides their number.
  const DataGroups& share_data(int size, bool gathers);
  const DataGroups& data_groups() const { return data_groups_; }
  int rank() const { return world_->rank(); }

 private:
  ProcessMesh() = default;
  void make_groups();
  std::shared_ptr<Communicator> make_group(std::span<const Axis> axes) const;

  MeshShape shape_;
  MeshCoordinates coordinates_;
  std::shared_ptr<Communicator> world_, embedding_, replicas_;
  DataGroups data_groups_;
  std::pair<int, bool> shared_{0, false};  ///< what they were made for
  std::array<std::shared_ptr<Communicator>, 6> axes_;
  std::vector<std::shared_ptr<Communicator>> tp_blocks_;  // by copies
  std::map<std::vector<Axis>, std::shared_ptr<Communicator>> groups_;
  bool alone_ = false;  // other ranks are not there
};

}  // namespace tessera
