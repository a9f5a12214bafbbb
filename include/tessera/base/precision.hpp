#pragma once
/// What a precision of training is in element types.

#include "tessera/base/config_words.hpp"
#include "tessera/base/dtype.hpp"

namespace tessera {

/// The type that weights are computed with.
DType dtype_of_precision(Precision precision);

}  // namespace tessera
