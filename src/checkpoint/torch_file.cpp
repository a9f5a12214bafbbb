#include "checkpoint/torch_file.hpp"

#include <algorithm>
#include <array>
#include <bit>

namespace tessera::checkpoint_detail {
namespace {

namespace fs = std::filesystem;
using Kind = PickleValue::Kind;

constexpr std::uint64_t kMostPickle = 256u << 20;
constexpr std::size_t kMostExtents = 64;  // a NumPy array's

struct StorageType {
  const char* name;
  const char* global;
  DType dtype;
};
constexpr std::array kStorageTypes = {StorageType{"FloatStorage", "torch.FloatStorage", DType::f32},
                                      StorageType{"HalfStorage", "torch.HalfStorage", DType::f16},
                                      StorageType{"BFloat16Storage", "torch.BFloat16Storage", DType::bf16},
                                      StorageType{"DoubleStorage", "torch.DoubleStorage", DType::f64},
                                      StorageType{"LongStorage", "torch.LongStorage", DType::i64},
                                      StorageType{"IntStorage", "torch.IntStorage", DType::i32},
                                      StorageType{"ShortStorage", "torch.ShortStorage", DType::i16},
                                      StorageType{"CharStorage", "torch.CharStorage", DType::i8},
                                      StorageType{"ByteStorage", "torch.ByteStorage", DType::u8},
                                      StorageType{"BoolStorage", "torch.BoolStorage", DType::u8}};

}  // namespace

std::optional<std::vector<std::int64_t>> extents(const PickleValue& value) {
  if (!value.is(Kind::tuple) && !value.is(Kind::list)) return std::nullopt;
  if (value.items.size() > kMostExtents) return std::nullopt;
  std::vector<std::int64_t> list;
  for (const PickleValue* item : value.items) {
    if (!item->is(Kind::integer) || item->integer < 0 || item->integer > kMostExtent) return std::nullopt;
    list.push_back(item->integer);
  }
  return list;
}

std::int64_t TorchTensor::numel() const {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  return count;
}

std::vector<std::int64_t> contiguous_strides(std::span<const std::int64_t> shape) {
  std::vector<std::int64_t> strides(shape.size(), 1);
  for (std::size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
  return strides;
}

bool TorchTensor::is_contiguous() const {
  std::int64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    if (shape[i] != 1 && strides[i] != stride) return false;
    stride *= shape[i];
  }
  return true;
}

std::string TorchTensor::describe() const {
  std::string text = std::string(name_of(dtype)) + " [";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

TorchFile::TorchFile(const fs::path& path, SymbolicLinks links)
    : path_(path), file_(open_for_reading(path, links)) {
  open(0, size_of_file(file_, path_));
}

TorchFile::TorchFile(const fs::path& path, std::uint64_t offset, std::uint64_t bytes, SymbolicLinks links)
    : path_(path), file_(open_for_reading(path, links)) {
  const std::uint64_t size = size_of_file(file_, path_);
  if (offset > size || bytes > size - offset)
    fail(detail::concat("bytes ", offset, " to ", offset + bytes), "lie outside of the file");
  open(offset, offset + bytes);
}

void TorchFile::fail(const std::string& where, const std::string& reason) const {
  bad_file(path_, where, reason, "Check that the file is whole and was saved by PyTorch.");
}

void TorchFile::open(std::uint64_t begin, std::uint64_t end) {
  zip_.emplace(file_, path_, begin, end);
  constexpr std::string_view kPickle = "/data.pkl";
  const ZipReader::Entry* found = nullptr;
  for (const ZipReader::Entry& entry : zip_->entries()) {
    if (!entry.name.ends_with(kPickle)) continue;
    if (found) fail("", "it holds two pickles, '" + found->name + "' and '" + entry.name + "'");
    found = &entry;
  }
  if (!found) fail("", "it is a zip archive without data.pkl");
  folder_ = found->name.substr(0, found->name.size() - kPickle.size());
  if (const ZipReader::Entry* order = zip_->find(folder_ + "/byteorder"); order && order->bytes < 16) {
    std::string text(static_cast<std::size_t>(order->bytes), ' ');
    zip_->read(*order, 0, std::as_writable_bytes(std::span(text)));
    if (text != "little") fail("byteorder", "'" + text + "' is not read; little is");
  }
  if (found->bytes > kMostPickle) fail("data.pkl", detail::concat("has ", found->bytes, " bytes, too many"));
  std::vector<std::byte> bytes(static_cast<std::size_t>(found->bytes));
  zip_->read(*found, 0, bytes);
  pickle_.emplace(bytes, path_.string());
}

std::optional<TorchTensor> TorchFile::tensor(const PickleValue& value) const {
  if (!value.is(Kind::object)) return std::nullopt;
  if (value.text == "torch._tensor._rebuild_from_type_v2") {
    // Of a tensor with attributes: its function, its type, the function's arguments, the attributes.
    if (value.items.size() < 3 || !value.items[0]->is(Kind::global) || !value.items[2]->is(Kind::tuple))
      fail("a tensor", "is made of no function and its arguments");
    PickleValue plain;
    plain.kind = Kind::object;
    plain.text = value.items[0]->text;
    plain.items = value.items[2]->items;
    if (plain.text == value.text) fail("a tensor", "is made of another of its kind");
    return tensor(plain);
  }
  const std::string& made = value.text;
  if (made == "torch._utils._rebuild_parameter" || made == "torch._utils._rebuild_parameter_with_state") {
    if (value.items.empty() || value.items[0] == &value || !value.items[0]->is(Kind::object) ||
        value.items[0]->text != "torch._utils._rebuild_tensor_v2")
      fail("a parameter", "is made of no tensor");
    return tensor(*value.items[0]);
  }
  if (!made.starts_with("torch._utils._rebuild_")) return std::nullopt;
  if (made != "torch._utils._rebuild_tensor_v2" && made != "torch._utils._rebuild_tensor")
    fail("a tensor", "made by " + made + " is not read");
  if (value.items.size() < 4 || !value.items[0]->is(Kind::persistent) || !value.items[1]->is(Kind::integer))
    fail("a tensor", "is described by something else than storage, offset, size and stride");
  const PickleValue& id = *value.items[0]->items[0];
  if (!id.is(Kind::tuple) || id.items.size() < 5 || !id.items[1]->is(Kind::global) ||
      !id.items[2]->is(Kind::text) || !id.items[4]->is(Kind::integer))
    fail("a storage", "is described by something else than type, key, place and size");
  const auto type = std::find_if(kStorageTypes.begin(), kStorageTypes.end(),
                                 [&](const StorageType& each) { return id.items[1]->text == each.global; });
  if (type == kStorageTypes.end()) fail("a tensor", "of type " + id.items[1]->text + " is not read");
  const std::string where = "storage " + id.items[2]->text;
  TorchTensor tensor{
      type->dtype, {}, {}, value.items[1]->integer, zip_->find(folder_ + "/data/" + id.items[2]->text)};
  if (!tensor.storage) fail(where, "is missing");
  const auto shape = extents(*value.items[2]), strides = extents(*value.items[3]);
  if (!shape || !strides || shape->size() != strides->size() || tensor.offset < 0)
    fail("a tensor of " + where, "has no proper size and stride");
  tensor.shape = *shape;
  tensor.strides = *strides;
  const auto elements = static_cast<std::int64_t>(tensor.storage->bytes / size_of(tensor.dtype));
  if (id.items[4]->integer != elements || tensor.storage->bytes % size_of(tensor.dtype) != 0)
    fail(where, detail::concat("has ", tensor.storage->bytes, " bytes, its description says ",
                               id.items[4]->integer, " elements of ", tensor.dtype));
  std::int64_t last = tensor.offset, count = 1, product = 0;
  bool empty = false, outside = false;
  for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
    empty |= tensor.shape[i] == 0;
    outside |= __builtin_mul_overflow(count, std::max<std::int64_t>(1, tensor.shape[i]), &count) ||
               __builtin_mul_overflow(tensor.shape[i] - 1, tensor.strides[i], &product) ||
               __builtin_add_overflow(last, product, &last);
  }
  if (outside || (!empty && last >= elements)) fail("a tensor of " + where, "reaches beyond it");
  return tensor;
}

/// Elements [element, ...) of the storage as they lie there.
void TorchFile::read_run(const TorchTensor& tensor, std::int64_t element, std::span<std::byte> out) const {
  zip_->read(*tensor.storage, static_cast<std::uint64_t>(element) * size_of(tensor.dtype), out);
}

void TorchFile::read(const TorchTensor& tensor, std::span<std::byte> out) const {
  if (tensor.shape.empty()) return read_run(tensor, tensor.offset, out);
  read_rows(tensor, 0, tensor.shape[0], out);
}

void TorchFile::read_rows(const TorchTensor& tensor, std::int64_t first, std::int64_t count,
                          std::span<std::byte> out) const {
  TorchTensor part = tensor;
  TESSERA_CHECK(!part.shape.empty() && first >= 0 && count >= 0 && first + count <= part.shape[0], "rows ",
                first, " to ", first + count, " of ", tensor.describe());
  part.shape[0] = count;
  part.offset += first * part.strides[0];
  const std::size_t element = size_of(part.dtype);
  TESSERA_CHECK_EQ(out.size(), static_cast<std::size_t>(part.numel()) * element, "bytes of rows");
  if (out.empty()) return;
  if (part.is_contiguous()) return read_run(part, part.offset, out);
  // Of a view the part of the storage that it spans, then element by element.
  std::int64_t span = 1;
  for (std::size_t i = 0; i < part.shape.size(); ++i) span += (part.shape[i] - 1) * part.strides[i];
  std::vector<std::byte> stored(static_cast<std::size_t>(span) * element);
  read_run(part, part.offset, stored);
  std::vector<std::int64_t> index(part.shape.size(), 0);
  std::int64_t at = 0;
  for (std::size_t to = 0; to < out.size(); to += element) {
    std::copy_n(stored.data() + static_cast<std::size_t>(at) * element, element, out.data() + to);
    for (std::size_t i = index.size(); i-- > 0;) {
      at += part.strides[i];
      if (++index[i] < part.shape[i]) break;
      at -= part.strides[i] * part.shape[i];
      index[i] = 0;
    }
  }
}

TorchPickle::TorchPickle() : bytes_("\x80\x02") {}

TorchPickle& TorchPickle::put(std::string_view code) {
  bytes_ += code;
  return *this;
}

TorchPickle& TorchPickle::global(std::string_view module, std::string_view name) {
  return put("c").put(module).put("\n").put(name).put("\n");
}

TorchPickle& TorchPickle::none() { return put("N"); }
TorchPickle& TorchPickle::boolean(bool value) { return put(value ? "\x88" : "\x89"); }

TorchPickle& TorchPickle::integer(std::int64_t value) {
  const bool is_short = value >= INT32_MIN && value <= INT32_MAX;
  put(is_short ? "J" : "\x8a\x08");
  return put({reinterpret_cast<const char*>(&value), is_short ? 4u : 8u});
}

TorchPickle& TorchPickle::real(double value) {
  const std::uint64_t bits = __builtin_bswap64(std::bit_cast<std::uint64_t>(value));
  return put("G").put({reinterpret_cast<const char*>(&bits), 8});
}

TorchPickle& TorchPickle::text(std::string_view value) {
  const auto size = static_cast<std::uint32_t>(value.size());
  return put("X").put({reinterpret_cast<const char*>(&size), 4}).put(value);
}

TorchPickle& TorchPickle::dtype(DType value) { return global("torch", name_of(value)); }

TorchPickle& TorchPickle::tensor(DType dtype, const Shape& shape) {
  const auto type = std::find_if(kStorageTypes.begin(), kStorageTypes.end(),
                                 [&](const StorageType& each) { return each.dtype == dtype; });
  global("torch._utils", "_rebuild_tensor_v2").put("((").text("storage").global("torch", type->name);
  text(std::to_string(storages_.size())).text("cpu").integer(shape.numel()).put("tQ").integer(0).put("(");
  for (int i = 0; i < shape.rank(); ++i) integer(shape[i]);
  put("t(");
  for (const std::int64_t stride : contiguous_strides(shape.dims())) integer(stride);
  put("t\x89").global("collections", "OrderedDict").put(")RtR");
  storages_.push_back({dtype, static_cast<std::uint64_t>(shape.numel()) * size_of(dtype)});
  return *this;
}

TorchPickle& TorchPickle::begin_list() { return put("]("); }
TorchPickle& TorchPickle::end_list() { return put("e"); }
TorchPickle& TorchPickle::begin_dict() { return put("}("); }
TorchPickle& TorchPickle::end_dict() { return put("u"); }
TorchPickle& TorchPickle::begin_namespace() {
  return global("types", "SimpleNamespace").put(")R").begin_dict();
}
TorchPickle& TorchPickle::end_namespace() { return end_dict().put("b"); }

TorchPickle& TorchPickle::begin_tuple() { return put("("); }
TorchPickle& TorchPickle::end_tuple() { return put("t"); }

TorchPickle& TorchPickle::size(const Shape& shape) {
  global("torch", "Size").put("(");
  for (int i = 0; i < shape.rank(); ++i) integer(shape[i]);
  return put("t\x85R");
}

TorchPickle& TorchPickle::begin_object(std::string_view module, std::string_view name) {
  return global(module, name).put(")\x81").begin_dict();
}
TorchPickle& TorchPickle::end_object() { return end_dict().put("b"); }

TorchPickle& TorchPickle::tensor_properties(DType type) {
  constexpr std::string_view kModule = "torch.distributed.checkpoint.metadata";
  global(kModule, "TensorProperties").put(")\x81(").dtype(type);
  global("torch.serialization", "_get_layout").text("torch.strided").put("\x85R\x89");
  return global(kModule, "_MEM_FORMAT_ENCODING").integer(0).put("\x85R\x89tb");
}

std::uint64_t TorchPickle::storage_bytes() const {
  std::uint64_t bytes = 0;
  for (const Storage& each : storages_) bytes += each.bytes;
  return bytes;
}

std::string TorchPickle::finish() { return std::exchange(bytes_, {}) + "."; }

std::uint64_t write_torch_archive(ZipWriter& zip, const std::string& name, TorchPickle pickle,
                                  const WriteStorage& write) {
  const std::string folder = name + "/";
  const auto bytes_of = [](std::string_view text) { return std::as_bytes(std::span(text)); };
  zip.add(folder + "data.pkl", bytes_of(pickle.finish()));
  zip.add(folder + "byteorder", bytes_of("little"));
  for (std::size_t i = 0; i < pickle.storages().size(); ++i) {
    zip.begin(folder + "data/" + std::to_string(i), pickle.storages()[i].bytes);
    write(i, [&](std::span<const std::byte> bytes) { zip.append(bytes); });
  }
  zip.add(folder + "version", bytes_of("3\n"));
  return zip.end_archive();
}

void write_torch_file(const fs::path& path, TorchPickle pickle, const WriteStorage& write) {
  ZipWriter zip(path);
  write_torch_archive(zip, path.stem().string(), std::move(pickle), write);
  zip.sync();
}

}  // namespace tessera::checkpoint_detail
