#pragma once
/// Which weights of a model fit into another one: what of the first is kept when the second is made of it.

#include <map>
#include <string>
#include <vector>

#include "tessera/checkpoint/hf.hpp"
#include "tessera/engine/engine.hpp"

namespace tessera {

/// Rows of a parameter that a tensor of the other model fills.
struct KeptRows {
  std::string tensor;      ///< Hugging Face's name
  std::int64_t here = 0;   ///< first row in the parameter
  std::int64_t there = 0;  ///< first row in the other model's parameter of that name
  std::int64_t count = 0;
};

/// Tensors of equal Hugging Face names and shapes are kept. What only the new model has, or has in another
/// shape, keeps what it was initialised with: drawn from the seed, on every layout the same.
struct WeightFit {
  std::map<std::string, std::vector<KeptRows>> kept;  ///< by Tessera's name of the parameter
  std::vector<std::string> drawn;                     ///< Hugging Face's names, like the next
  std::vector<std::string> dropped;                   ///< what the new model does not have at all
  std::int64_t kept_tensors = 0;

  /// "drawn anew from the seed: transformer.h.*.attn.c_attn.weight; left out: ...; 12 tensors keep their
  /// weights"
  std::string text() const;
};

/// How weights of `from` fit into `to`, whose tensors are counted under the names of `from`'s type.
WeightFit weight_fit(const Architecture& from, Architecture to);

/// Reads kept rows of a parameter from the other model into what `piece` holds of them.
void read_rows(const HfModel& from, const KeptRows& rows, const StatePiece& piece, const ExecCtx& ctx);

}  // namespace tessera
