#include "arrays.hpp"

#include <limits>
#include <optional>

namespace py = pybind11;

namespace tessera::bindings {
namespace {

std::optional<DType> dtype_of(const py::array& array) {
  if (py::isinstance<py::array_t<float>>(array)) return DType::f32;
  if (py::isinstance<py::array_t<double>>(array)) return DType::f64;
  if (py::isinstance<py::array_t<std::int32_t>>(array)) return DType::i32;
  if (py::isinstance<py::array_t<std::int64_t>>(array)) return DType::i64;
  if (py::isinstance<py::array_t<std::uint8_t>>(array)) return DType::u8;
  return std::nullopt;
}

py::dtype numpy_dtype(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return py::dtype::of<float>();
    case DType::f64:
      return py::dtype::of<double>();
    case DType::i32:
      return py::dtype::of<std::int32_t>();
    case DType::i64:
      return py::dtype::of<std::int64_t>();
    case DType::u8:
      return py::dtype::of<std::uint8_t>();
    default:
      TESSERA_CHECK(false, "NumPy has no dtype for ", dtype);
  }
}

/// Lets go of a Python object wherever it happens.
std::shared_ptr<void> keep(py::object object) {
  return {object.release().ptr(), [](void* pointer) {
            const py::gil_scoped_acquire gil;
            py::handle(static_cast<PyObject*>(pointer)).dec_ref();
          }};
}

template <typename From>
void append(const py::array& array, const char* name, std::vector<std::int32_t>& out) {
  const auto values = py::array_t<From, py::array::c_style | py::array::forcecast>::ensure(array);
  for (py::ssize_t i = 0; i < values.size(); ++i) {
    const From value = values.data()[i];
    TESSERA_CHECK(std::in_range<std::int32_t>(value), name, ": value number ", i, " is ", value,
                  ", which is no int32");
    out.push_back(static_cast<std::int32_t>(value));
  }
}

}  // namespace

Shape shape_of(const py::array& array) {
  const std::vector<std::int64_t> dims(array.shape(), array.shape() + array.ndim());
  return Shape(std::span<const std::int64_t>(dims));
}

Tensor tensor_of(const py::array& array) {
  const std::optional<DType> dtype = dtype_of(array);
  TESSERA_CHECK(dtype, "an array of dtype ", py::str(array.dtype()).cast<std::string>(),
                "; float32, float64, int32, int64 and uint8 are supported");
  TESSERA_CHECK((array.flags() & py::array::c_style) != 0 &&
                    (array.flags() & py::detail::npy_api::NPY_ARRAY_ALIGNED_) != 0,
                "the array must be C-contiguous and aligned: pass numpy.ascontiguousarray(array)");
  return Tensor::wrap(const_cast<void*>(array.data()), shape_of(array), *dtype, keep(array));
}

py::object array_of(const Tensor& tensor) {
  if (!tensor) return py::none();
  auto host = std::make_unique<Tensor>(tensor.device().is_cpu() ? tensor : tensor.to_host());
  TESSERA_CHECK(host->is_contiguous(), "only contiguous tensors become arrays");
  const std::vector<py::ssize_t> shape(host->shape().dims().begin(), host->shape().dims().end());
  void* const memory = host->raw();
  const py::dtype dtype = numpy_dtype(host->dtype());
  const py::capsule owner(host.release(), [](void* held) { delete static_cast<Tensor*>(held); });
  return py::array(dtype, shape, {}, memory, owner);
}

std::vector<std::int32_t> integers_of(const py::array& array, const char* name) {
  std::vector<std::int32_t> values;
  values.reserve(static_cast<std::size_t>(array.size()));
  const char kind = array.dtype().kind();
  TESSERA_CHECK(kind == 'i' || kind == 'u', name, " holds no integers but ",
                py::str(array.dtype()).cast<std::string>());
  if (kind == 'u' && array.itemsize() == 8) {
    append<std::uint64_t>(array, name, values);
  } else {
    append<std::int64_t>(array, name, values);
  }
  return values;
}

}  // namespace tessera::bindings
