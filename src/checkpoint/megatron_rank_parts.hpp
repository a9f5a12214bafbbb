#pragma once
/// What each rank of Megatron has of a model that is written for it, and of the state of its optimizer.

#include <array>
#include <cstddef>
#include <string>
#include <vector>

#include "checkpoint/hf_plan.hpp"
#include "checkpoint/megatron_slices.hpp"
#include "tessera/checkpoint/megatron.hpp"

namespace tessera::checkpoint_detail {

class RankParts {
 public:
  /// All outlive it. `run`: what goes along with the weights; null: nothing. Errors: InvalidArgument where
  /// the weights are not those of the model.
  RankParts(const Architecture& config, const WeightSource& weights, const MegatronExportOptions& options,
            const RunSource* run);

  const ModelConfig& model() const { return model_; }
  const RunSource* run() const { return run_; }
  /// Rows of the vocabulary over all tensor ranks.
  std::int64_t padded_vocabulary() const { return padded_; }
  /// The tensors of a stage, counted in the order in which the model runs through ranks' virtual stages;
  /// those of one dictionary beside each other.
  std::vector<RankPart> of_stage(std::int64_t stage) const;
  /// What a rank's optimizer has, in its model's order: the copy of a tied embedding is a parameter where
  /// another stage has the embedding, and comes before the head for masked tokens.
  std::vector<RankPart> as_registered(std::vector<RankPart> parts) const;
  /// Hands over what a tensor rank has of a part, in as many pieces as it takes.
  void write(const RankPart& part, std::int64_t tensor_rank, const HfAppend& append);

 private:
  /// One of the values that a run has of its parameters.
  class Value final : public WeightSource {
   public:
    Value(const RunSource* run, RunValue value) : run_(run), value_(value) {}
    std::vector<TensorSpec> tensors() const override { return run_->parameters(); }
    void read(const std::string& name, std::span<std::byte> out) const override;

   private:
    const RunSource* run_;
    RunValue value_;
  };

  void add(std::vector<RankPart>& parts, const TensorSpec& spec, std::vector<std::string> path) const;
  void write_groups(const RankPart& part, std::span<const TensorSlice> boxes, WeightStage& stage,
                    const TensorSpec& spec, const HfAppend& append);
  void write_padding(const RankPart& part, std::int64_t rows, WeightStage& stage, const TensorSpec& spec,
                     const HfAppend& append);
  const TensorSpec& spec_of(const std::string& name) const;

  const ModelConfig& model_;
  const MegatronExportOptions& options_;
  const RunSource* run_;
  std::int64_t padded_ = 0;
  std::vector<TensorSpec> specs_;
  std::vector<std::size_t> order_;  ///< of specs_, as the model runs
  WeightStage weights_;
  std::array<Value, 3> values_;      ///< by RunValue
  std::array<WeightStage, 3> runs_;  ///< of them
  std::vector<std::byte> heads_;     ///< of a rank's queries, keys and values
};

}  // namespace tessera::checkpoint_detail
