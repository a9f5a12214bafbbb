#pragma once
/// Pieces of what a ParamStore or an Optimizer holds, as checkpoints read and write them.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/autograd/parameter.hpp"
#include "tessera/base/range.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera {

/// fp32 values that do not lie on the device.
class StateSource {
 public:
  virtual ~StateSource() = default;
  virtual void read(const Range& run, float* out) = 0;
  virtual void write(const Range& run, const float* source) = 0;
};

/// Values of a store that count as fp32, where they lie: as such, split by ops::split_main, or elsewhere.
struct StateValues {
  Tensor values = {};  ///< f32, or bf16 beside `low`; undefined of a source
  Tensor low = {};     ///< u16; undefined unless the values are split
  std::shared_ptr<StateSource> source = nullptr;
  Range run = {};  ///< of the source

  std::int64_t numel() const { return source ? run.count : values.numel(); }
  StateValues narrow(std::int64_t begin, std::int64_t count) const;
  /// In fp32: a view, or of split values and of a source a copy, of the latter in host memory.
  Tensor read(const ExecCtx& ctx) const;
  /// Sets them to numel() floats of host memory.
  void write(const ExecCtx& ctx, const float* from) const;
};

/// Elements [begin, end) of this rank's part of a parameter, as checkpoints read and write them; where they
/// lie in the whole parameter: parameter->placement().boxes(begin, end).
struct StatePiece {
  std::string kind;  ///< "param", "adam_m", "adam_v" or "momentum"
  Parameter* parameter = nullptr;
  std::int64_t begin = 0, end = 0;
  StateValues values;  ///< [end - begin]: writing restores a checkpoint

  /// "param.<name of the parameter>", ...
  std::string name() const { return kind + "." + parameter->name(); }
  /// The boxes of the whole parameter that it consists of, and the values of each, which lie together.
  struct Box {
    Placed place;
    StateValues values;
  };
  std::vector<Box> boxes() const;
};
enum class PieceSet {
  /// What this rank saves: pieces of all ranks together cover every element of the model exactly once. What
  /// several data ranks hold is cut into equal parts, one for each of them.
  owned,
  /// What this rank must be given to resume.
  held
};

}  // namespace tessera
