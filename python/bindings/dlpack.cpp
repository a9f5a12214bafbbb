#include "dlpack.hpp"

#include <pybind11/stl.h>
#include <algorithm>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "bindings.hpp"
#include "tessera/base/error.hpp"
#include "tessera/device/foreign_stream.hpp"

namespace py = pybind11;

namespace tessera::bindings {
namespace {

/// The binary interface of DLPack 0.x, which every library with __dlpack__ speaks: a capsule named "dltensor"
/// that holds a Managed, and is named "used_dltensor" once somebody has taken it.
/// https://dmlc.github.io/dlpack/latest/c_api.html
namespace abi {

constexpr char kFresh[] = "dltensor", kUsed[] = "used_dltensor";

enum DeviceKind : std::int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3 };
enum TypeCode : std::uint8_t { kInt = 0, kUnsigned = 1, kFloat = 2, kBfloat = 4 };

struct Place {
  std::int32_t kind, index;
};
struct Type {
  std::uint8_t code, bits;
  std::uint16_t lanes;
};
struct Array {
  void* data;
  Place place;
  std::int32_t rank;
  Type type;
  std::int64_t *shape, *strides;
  std::uint64_t byte_offset;
};
struct Managed {
  Array array;
  void* owner;
  void (*deleter)(Managed*);
};

}  // namespace abi

constexpr std::pair<DType, abi::Type> kTypes[] = {
    {DType::f32, {abi::kFloat, 32, 1}},    {DType::f64, {abi::kFloat, 64, 1}},
    {DType::f16, {abi::kFloat, 16, 1}},    {DType::bf16, {abi::kBfloat, 16, 1}},
    {DType::i64, {abi::kInt, 64, 1}},      {DType::i32, {abi::kInt, 32, 1}},
    {DType::i16, {abi::kInt, 16, 1}},      {DType::i8, {abi::kInt, 8, 1}},
    {DType::u32, {abi::kUnsigned, 32, 1}}, {DType::u16, {abi::kUnsigned, 16, 1}},
    {DType::u8, {abi::kUnsigned, 8, 1}}};

abi::Type type_of(DType dtype) {
  for (const auto& [own, type] : kTypes) {
    if (own == dtype) return type;
  }
  TESSERA_CHECK(false, "DLPack has no name for ", dtype);
}

DType dtype_of(const abi::Type& type) {
  for (const auto& [own, other] : kTypes) {
    if (other.code == type.code && other.bits == type.bits && other.lanes == type.lanes) return own;
  }
  TESSERA_CHECK(false, "an array of DLPack's type code ", int{type.code}, " with ", int{type.bits},
                " bits and ", type.lanes, " lanes is not supported");
}

Device device_of(const abi::Place& place) {
  if (place.kind == abi::kCpu || place.kind == abi::kCudaHost) return {};
  TESSERA_CHECK(place.kind == abi::kCuda, "memory on a device of DLPack's kind ", place.kind,
                " cannot be read; move it to the CPU or a CUDA device");
  return {DeviceType::cuda, place.index};
}

/// Memory of a GPU that Python holds.
struct SharedTensor {
  Tensor tensor;

  py::tuple place() const { return py::make_tuple(int{abi::kCuda}, tensor.device().index); }
};

/// A tensor another library reads through a capsule.
struct Lent {
  Tensor tensor;
  std::vector<std::int64_t> shape, strides;
  void* stream = nullptr;  // where it is read
  abi::Managed managed{};
};

void take_back(abi::Managed* managed) {
  const std::unique_ptr<Lent> lent(static_cast<Lent*>(managed->owner));
  try {
    // Whoever gets the memory next does not know of that stream.
    synchronize_foreign(lent->tensor.device(), lent->stream);
  } catch (const Error&) {
    // The device is lost, and with it who else might have read there.
  }
}

void drop_fresh(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, abi::kFresh) == 0) return;
  auto* managed = static_cast<abi::Managed*>(PyCapsule_GetPointer(capsule, abi::kFresh));
  managed->deleter(managed);
}

/// The reader's stream as __dlpack__ is told it: none is the default stream, and so is 1.
void* stream_of(const std::optional<std::int64_t>& number) {
  return !number || *number <= 1 ? nullptr : reinterpret_cast<void*>(*number);
}

py::capsule lend(const SharedTensor& shared, const std::optional<std::int64_t>& stream) {
  auto lent = std::make_unique<Lent>();
  const Tensor& tensor = lent->tensor = shared.tensor;
  const Shape strides = tensor.shape().contiguous_strides();
  lent->shape.assign(tensor.shape().dims().begin(), tensor.shape().dims().end());
  lent->strides.assign(strides.dims().begin(), strides.dims().end());
  lent->stream = stream_of(stream);
  abi::Managed& managed = lent->managed;
  managed.array = {tensor.raw(),
                   {abi::kCuda, tensor.device().index},
                   tensor.rank(),
                   type_of(tensor.dtype()),
                   lent->shape.data(),
                   lent->strides.data(),
                   0};
  managed.owner = lent.get();
  managed.deleter = take_back;
  const py::object capsule =
      py::reinterpret_steal<py::object>(PyCapsule_New(&lent->managed, abi::kFresh, drop_fresh));
  if (!capsule) throw py::error_already_set();
  lent.release();
  return py::reinterpret_borrow<py::capsule>(capsule);
}

/// An array without elements is, whatever its strides.
bool is_contiguous(const abi::Array& array) {
  if (std::find(array.shape, array.shape + array.rank, 0) != array.shape + array.rank) return true;
  std::int64_t step = 1;
  for (int i = array.rank - 1; array.strides != nullptr && i >= 0; --i) {
    if (array.shape[i] != 1 && array.strides[i] != step) return false;
    step *= array.shape[i];
  }
  return true;
}

/// Another library's memory, given back with the last reference.
std::shared_ptr<abi::Managed> take(const py::object& object, void* stream) {
  const py::object capsule =
      stream == nullptr
          ? object.attr("__dlpack__")()
          : object.attr("__dlpack__")(py::arg("stream") = reinterpret_cast<std::intptr_t>(stream));
  TESSERA_CHECK(PyCapsule_IsValid(capsule.ptr(), abi::kFresh) != 0,
                "__dlpack__ gave no capsule named \"dltensor\"");
  auto* managed = static_cast<abi::Managed*>(PyCapsule_GetPointer(capsule.ptr(), abi::kFresh));
  PyCapsule_SetName(capsule.ptr(), abi::kUsed);
  return {managed, [](abi::Managed* taken) {
            const py::gil_scoped_acquire gil;
            if (taken->deleter != nullptr) taken->deleter(taken);
          }};
}

}  // namespace

py::object shared_of(const ExecCtx& ctx, const Tensor& tensor) {
  if (!tensor || ctx.device().is_cpu()) return array_of(tensor);
  TESSERA_CHECK(tensor.is_contiguous(), "only contiguous tensors are shared");
  return py::cast(SharedTensor{tensor});
}

Tensor tensor_from(const ExecCtx& ctx, const py::object& object) {
  if (py::isinstance<py::array>(object)) {
    const Tensor given = tensor_of(object.cast<py::array>());
    if (ctx.device().is_cpu()) return given;
    const Tensor tensor = Tensor::empty(ctx, given.shape(), given.dtype());
    tensor.copy_from_host(given.raw());
    return tensor;
  }
  TESSERA_CHECK(py::hasattr(object, "__dlpack__"), "a ", py::str(py::type::of(object)).cast<std::string>(),
                " is neither a NumPy array nor anything with __dlpack__");
  const auto place = object.attr("__dlpack_device__")().cast<std::pair<std::int32_t, std::int32_t>>();
  const Device from = device_of({place.first, place.second});
  TESSERA_CHECK(from.is_cpu() || from == ctx.device(), "the array lies on ", from, ", the engine on ",
                ctx.device(), "; move it there first");
  const std::shared_ptr<abi::Managed> taken = take(object, from.is_cpu() ? nullptr : ctx.stream->native());
  const abi::Array& array = taken->array;
  TESSERA_CHECK(is_contiguous(array), "the array must be contiguous: pass array.contiguous()");
  const Shape shape(std::span<const std::int64_t>(array.shape, static_cast<std::size_t>(array.rank)));
  void* const data = static_cast<std::byte*>(array.data) + array.byte_offset;
  const DType dtype = dtype_of(array.type);
  if (ctx.device().is_cpu()) return Tensor::wrap(data, shape, dtype, taken);
  const py::gil_scoped_release release;
  const Tensor tensor = Tensor::empty(ctx, shape, dtype);
  if (from.is_cpu()) {
    tensor.copy_from_host(data);
  } else {
    ctx.stream->copy(tensor.raw(), data, tensor.nbytes());
    ctx.stream->synchronize();  // then its owner may have it back
  }
  return tensor;
}

void bind_dlpack(py::module_& module) {
  py::class_<SharedTensor>(module, "Tensor", "Memory on a GPU that other libraries share by DLPack.")
      .def(
          "__dlpack__",
          [](const SharedTensor& self, const std::optional<std::int64_t>& stream, const py::object&,
             const std::optional<std::pair<int, int>>& device, const std::optional<bool>& copy) {
            if ((device && *device != std::pair(int{abi::kCuda}, self.tensor.device().index)) ||
                copy.value_or(false))
              throw py::buffer_error("a tensor's memory is shared where it lies, neither moved nor copied");
            return lend(self, stream);
          },
          py::kw_only(), py::arg("stream") = py::none(), py::arg("max_version") = py::none(),
          py::arg("dl_device") = py::none(), py::arg("copy") = py::none())
      .def("__dlpack_device__", &SharedTensor::place)
      .def_property_readonly(
          "shape",
          [](const SharedTensor& self) {
            const auto dims = self.tensor.shape().dims();
            return py::tuple(py::cast(std::vector<std::int64_t>(dims.begin(), dims.end())));
          })
      .def(
          "numpy", [](const SharedTensor& self) { return array_of(self.tensor); }, "A copy in host memory.");
}

}  // namespace tessera::bindings
