#pragma once
/// Pieces of what a ParamStore or an Optimizer holds, as checkpoints read and write them.

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/autograd/parameter.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera {

/// Values of a store that count as fp32, where they lie: as such, or split by ops::split_main.
struct StateValues {
  Tensor values;    ///< f32, or bf16 beside `low`
  Tensor low = {};  ///< u16; undefined unless the values are split

  std::int64_t numel() const { return values.numel(); }
  StateValues narrow(std::int64_t begin, std::int64_t count) const;
  /// In fp32: a view, or of split values a copy.
  Tensor read(const ExecCtx& ctx) const;
  /// Sets them to numel() floats of host memory.
  void write(const ExecCtx& ctx, const float* source) const;
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
  /// What this rank saves: pieces of all ranks together cover every element of the model exactly once.
  owned,
  /// What this rank must be given to resume.
  held
};

}  // namespace tessera
