#pragma once
/// A small training state whose every byte depends on its step.

#include "scratch.hpp"
#include "tessera/checkpoint/checkpoint.hpp"

namespace tessera::test {

class SampleRun {
 public:
  explicit SampleRun(std::int64_t step) : step_(step) {
    add("param.w", DType::f32, {13, 5}, "shard(0)");
    add("param.b", DType::bf16, {3}, "replicate");
    add("adam_m.w", DType::f32, {13, 5}, "shard(0)");
  }

  std::vector<CheckpointTensor> tensors() const {
    std::vector<CheckpointTensor> out;
    for (const auto& t : tensors_) {
      const TensorView view{t.spec.name, t.spec.dtype, t.spec.shape, t.bytes.data()};
      out.push_back(CheckpointTensor::whole(view, t.placement));
    }
    return out;
  }
  CheckpointState state() const {
    CheckpointState state;
    state.step = step_;
    state.consumed_samples = 32 * step_;
    state.config_json = R"({"model":{"lr":6e-4}})";
    state.rng_json = "[18446744073709551615,0]";
    state.data_json = R"({"position":17})";
    return state;
  }
  fs::path save(const fs::path& root, SaveOptions options = {}) const {
    if (options.chunk_bytes == SaveOptions{}.chunk_bytes)
      options.chunk_bytes = 64;  // several chunks per tensor
    return save_checkpoint(root, state(), tensors(), options);
  }
  /// Throws what reading throws; fails the test where bytes differ.
  void expect_equal(const fs::path& dir) const {
    const CheckpointReader reader(dir);
    EXPECT_EQ(reader.state().step, step_);
    EXPECT_EQ(reader.manifest().tensors.size(), tensors_.size());
    for (const auto& t : tensors_) {
      std::vector<std::byte> out(t.bytes.size());
      reader.read(t.spec.name, out);
      EXPECT_EQ(out, t.bytes) << t.spec.name;
    }
  }

 private:
  struct Owned {
    TensorSpec spec;
    std::string placement;
    std::vector<std::byte> bytes;
  };
  void add(const char* name, DType dtype, Shape shape, const char* placement) {
    TensorSpec spec{name, dtype, shape};
    auto bytes =
        random_bytes(spec.bytes(), static_cast<unsigned>(step_ * 16 + static_cast<int>(tensors_.size())));
    tensors_.push_back({spec, placement, std::move(bytes)});
  }
  std::int64_t step_;
  std::vector<Owned> tensors_;
};

}  // namespace tessera::test
