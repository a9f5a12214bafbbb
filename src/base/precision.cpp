#include "tessera/base/precision.hpp"

#include "tessera/base/error.hpp"

namespace tessera {

DType dtype_of_precision(Precision precision) {
  switch (precision) {
    case Precision::fp32:
      return DType::f32;
    case Precision::bf16:
      return DType::bf16;
    case Precision::fp16:
      return DType::f16;
  }
  throw InternalError("a precision without a dtype");
}

}  // namespace tessera
