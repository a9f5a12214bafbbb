#pragma once
/// A checkpoint of Megatron that is open: its ranks' files, and whose tensors they hold.

#include <array>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/megatron_args.hpp"
#include "checkpoint/megatron_optimizer.hpp"
#include "checkpoint/megatron_parts.hpp"
#include "checkpoint/megatron_training.hpp"
#include "checkpoint/torch_folders.hpp"
#include "tessera/checkpoint/megatron.hpp"

namespace tessera {
namespace checkpoint_detail {

/// A piece of a model: what a rank's file has under `model`, or under `model0`, `model1`, ... with virtual
/// stages.
struct MegatronChunk {
  const TorchFile* file = nullptr;
  /// By names as they are there, in the file's order, which is that in which the model registered them.
  std::vector<std::pair<std::string, TorchTensor>> tensors;
};

/// What goes on with a run, beside the weights.
struct MegatronRunParts {
  MegatronTraining training;
  Config config = Settings{};       ///< its settings with the model, once that is known
  std::array<StoredSet, 3> values;  ///< by RunValue
  bool counted = false;             ///< whether a rank has said how far the optimizer is
};

}  // namespace checkpoint_detail

struct MegatronModel::Impl {
  using Chunk = checkpoint_detail::MegatronChunk;
  using Set = checkpoint_detail::StoredSet;

  std::filesystem::path dir;
  ModelSettings settings;     ///< what arguments and tensors say of the model so far
  Architecture architecture;  ///< once that is all
  std::int64_t iteration = 0, tensor = 1, pipeline = 1, data = 1, version = 0;
  bool two_stacks = false;  ///< T5
  std::vector<std::string> notes;
  std::vector<std::unique_ptr<checkpoint_detail::TorchFile>> files;
  std::vector<std::unique_ptr<checkpoint_detail::TensorHolder>>
      holders;  ///< of torch_dist, one of each tensor
  Set weights;
  std::optional<checkpoint_detail::MegatronRunParts> run;

  /// `with_run`: also what goes on with it, or nothing is opened.
  void load(const MegatronReadOptions& options, bool with_run);
  /// Reads a weight as it is stored.
  void read(const std::string& name, std::span<std::byte> out) const;
  /// Reads a box of one.
  void read_box(const std::string& name, const TensorSlice& box, std::span<std::byte> out) const;
  /// Reads a value of a run; a main weight has to be the one that the model's was made of.
  void read(RunValue value, const std::string& name, std::span<float> out) const;

 private:
  void check_ranks(const checkpoint_detail::MegatronArgs& args, const std::filesystem::path& path) const;
  void read_tensor_rank(std::int64_t tp, const checkpoint_detail::MegatronArgs& args, SymbolicLinks links,
                        std::set<std::string>& unexpected);
  std::vector<Chunk> read_rank(std::int64_t tp, std::optional<std::int64_t> pp,
                               const checkpoint_detail::MegatronArgs& args, bool first, SymbolicLinks links);
  void take(const Chunk& chunk, std::int64_t first_layer, bool tied, Set& to,
            std::set<std::string>& unexpected) const;
  void take(const checkpoint_detail::TensorHolder& holder, const std::string& name,
            const checkpoint_detail::TorchTensor& tensor_of_it, std::int64_t first_layer, bool tied, Set& to,
            std::set<std::string>& unexpected) const;
  /// Iteration and version of a checkpoint whose first file this is.
  void take_version(const checkpoint_detail::TorchFile& file);
  /// The format torch_dist: whole tensors in parts, those of equal layers as one.
  void read_distributed(const checkpoint_detail::TorchFile& common,
                        const checkpoint_detail::MegatronArgs& args, SymbolicLinks links,
                        std::set<std::string>& unexpected);
  /// `stored`: in the checkpoint; `name`: of the weight whose value it is.
  struct PartedName {
    std::string stored, name;
  };
  void take_whole(const std::shared_ptr<const checkpoint_detail::HfStorage>& all, const PartedName& tensor,
                  bool tied, Set& to, std::set<std::string>& unexpected);
  void take_distributed_facts(const checkpoint_detail::TorchFile& common,
                              const std::map<std::string, checkpoint_detail::DcpPlace>& blobs,
                              SymbolicLinks links);
  void take_group_blobs(const std::map<std::string, checkpoint_detail::DcpPlace>& blobs, SymbolicLinks links);
  void check_distributed_run();
  /// What an optimizer says, which is that of all ranks.
  void take_facts(const checkpoint_detail::OptimizerFacts& facts, const std::filesystem::path& file);
  void take_optimizer(const std::vector<Chunk>& chunks, std::int64_t stage,
                      std::array<std::vector<Chunk>, 3>& to, SymbolicLinks links);
  void take_two_stacks(const checkpoint_detail::MegatronArgs& args);
  void check(const std::set<std::string>& unexpected);
  void settle_family(const checkpoint_detail::MegatronArgs& args);
  void settle_vocabulary(const checkpoint_detail::MegatronArgs& args, const MegatronReadOptions& options);
  void settle_copies(Set& set) const;
  std::vector<Set*> every_set();
  void settle_run();
  void note_rest(const checkpoint_detail::PickleValue& root);
  checkpoint_detail::StoredOrder order() const { return {&architecture.model, version}; }
};

}  // namespace tessera
