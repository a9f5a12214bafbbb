#include "tessera/checkpoint/manifest.hpp"

#include <zlib.h>

#include <algorithm>
#include <charconv>

#include "checkpoint/json_strict.hpp"
#include "checkpoint/slice_runs.hpp"

namespace tessera {
namespace {

using namespace checkpoint_detail;

constexpr const char* kManifestFormat = "tessera-checkpoint";
constexpr std::int64_t kManifestVersion = 1;
constexpr std::uint64_t kMaxManifestBytes = 512'000'000;
constexpr DType kTensorTypes[] = {DType::f32, DType::bf16, DType::f16, DType::f64, DType::i32, DType::i64,
                                  DType::u32, DType::u16,  DType::i16, DType::i8,  DType::u8};

std::string hex(std::uint32_t value) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text(8, '0');
  for (int i = 0; i < 8; ++i) text[7 - i] = kDigits[value >> (4 * i) & 15];
  return text;
}

std::uint32_t parse_hex(const JsonView& place) {
  const std::string& text = place.text();
  std::uint32_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  if (text.size() != 8 || error != std::errc() || end != text.data() + text.size() || hex(value) != text)
    place.fail("expected 8 hexadecimal digits");
  return value;
}

/// Over everything but the checksum itself, in one canonical spelling, so that re-indenting a manifest does
/// no harm.
std::string checksum_of(Json manifest) {
  manifest.erase("checksum");
  const std::string text = to_text(manifest, -1);
  return hex(
      static_cast<std::uint32_t>(::crc32_z(0, reinterpret_cast<const Bytef*>(text.data()), text.size())));
}

Json to_json(const Shape& shape) {
  return std::vector<std::int64_t>(shape.dims().begin(), shape.dims().end());
}

Json to_json(const Manifest::Tensor& tensor, const std::vector<Manifest::File>& files) {
  Json pieces = Json::array();
  for (const Manifest::Piece& piece : tensor.pieces) {
    Json crc = Json::array();
    for (const std::uint32_t value : piece.crc32) crc.push_back(hex(value));
    pieces.push_back({{"file", files.at(piece.file).name},
                      {"key", piece.key},
                      {"offset", to_json(piece.slice.offset)},
                      {"shape", to_json(piece.slice.shape)},
                      {"bytes", {piece.begin, piece.end}},
                      {"crc32", std::move(crc)}});
  }
  return {{"name", tensor.name},
          {"dtype", name_of(tensor.dtype)},
          {"shape", to_json(tensor.shape)},
          {"placement", tensor.placement},
          {"pieces", std::move(pieces)}};
}

Json parse_blob(const std::string& text, const char* what) {
  try {
    return parse_json(text, what);
  } catch (const CheckpointError& error) {
    throw InvalidArgument(error.what());
  }
}

DType parse_dtype(const JsonView& place) {
  for (const DType dtype : kTensorTypes) {
    if (name_of(dtype) == place.text()) return dtype;
  }
  place.fail("\"" + place.text() + "\" is not a known dtype");
}

Manifest::Piece parse_piece(const JsonView& place, const Manifest& manifest, const Manifest::Tensor& tensor) {
  place.only({"file", "key", "offset", "shape", "bytes", "crc32"});
  Manifest::Piece piece;
  const std::string& file = place["file"].text();
  const auto known = std::find_if(manifest.files.begin(), manifest.files.end(),
                                  [&](const Manifest::File& entry) { return entry.name == file; });
  if (known == manifest.files.end()) place["file"].fail("is not among $.files");
  piece.file = static_cast<std::size_t>(known - manifest.files.begin());
  piece.key = place["key"].text();
  piece.slice = {place["offset"].shape(), place["shape"].shape()};
  try {
    check_slice(tensor.name, tensor.shape, piece.slice);
  } catch (const InvalidArgument& error) {
    place.fail(error.what());
  }
  const JsonView bytes = place["bytes"];
  if (bytes.size() != 2) bytes.fail("expected two numbers");
  piece.begin = static_cast<std::uint64_t>(bytes[0].integer());
  piece.end = static_cast<std::uint64_t>(bytes[1].integer());
  const auto wanted = static_cast<std::uint64_t>(piece.slice.shape.numel()) * size_of(tensor.dtype);
  if (piece.begin < known->header_bytes || piece.end < piece.begin || piece.end > known->bytes ||
      piece.end - piece.begin != wanted)
    bytes.fail("does not match the file's size or the piece's shape");
  const JsonView crc = place["crc32"];
  if (crc.size() != (wanted + manifest.chunk_bytes - 1) / manifest.chunk_bytes)
    crc.fail("does not have one checksum per chunk");
  for (std::size_t i = 0; i < crc.size(); ++i) piece.crc32.push_back(parse_hex(crc[i]));
  return piece;
}

/// Sizes that add up, and no two boxes that touch: together that is a cover of every element once.
void check_cover(const JsonView& place, const Manifest::Tensor& tensor) {
  std::int64_t covered = 0;
  std::vector<const TensorSlice*> boxes;
  for (const auto& piece : tensor.pieces) {
    covered += piece.slice.shape.numel();
    if (covered > tensor.shape.numel()) place.fail("its pieces overlap");
    if (piece.slice.shape.numel() > 0) boxes.push_back(&piece.slice);
  }
  if (covered != tensor.shape.numel())
    place.fail(detail::concat("its pieces hold ", covered, " of ", tensor.shape.numel(), " elements"));
  if (tensor.shape.rank() == 0 || boxes.size() < 2) return;
  std::sort(boxes.begin(), boxes.end(),
            [](const TensorSlice* a, const TensorSlice* b) { return a->offset[0] < b->offset[0]; });
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    const std::int64_t end = boxes[i]->offset[0] + boxes[i]->shape[0];
    for (std::size_t j = i + 1; j < boxes.size() && boxes[j]->offset[0] < end; ++j) {
      if (intersect(*boxes[i], *boxes[j])) place.fail("its pieces overlap");
    }
  }
}

Manifest::Tensor parse_tensor(const JsonView& place, const Manifest& manifest) {
  place.only({"name", "dtype", "shape", "placement", "pieces"});
  Manifest::Tensor tensor;
  tensor.name = place["name"].text();
  tensor.dtype = parse_dtype(place["dtype"]);
  tensor.shape = place["shape"].shape();
  tensor.placement = place["placement"].text();
  const JsonView pieces = place["pieces"];
  for (std::size_t i = 0; i < pieces.size(); ++i)
    tensor.pieces.push_back(parse_piece(pieces[i], manifest, tensor));
  check_cover(place, tensor);
  return tensor;
}

void parse_files(const JsonView& files, Manifest& manifest) {
  for (std::size_t i = 0; i < files.size(); ++i) {
    const JsonView place = files[i];
    place.only({"name", "bytes", "header_bytes", "header_crc32"});
    Manifest::File file;
    file.name = place["name"].text();
    if (!is_plain_file_name(file.name)) place["name"].fail("is not the plain name of a file in this folder");
    file.bytes = static_cast<std::uint64_t>(place["bytes"].integer(8));
    file.header_bytes = static_cast<std::uint64_t>(place["header_bytes"].integer(8));
    if (file.header_bytes > file.bytes) place.fail("header_bytes exceed bytes");
    file.header_crc32 = parse_hex(place["header_crc32"]);
    for (const auto& other : manifest.files) {
      if (other.name == file.name) place.fail("the file is listed twice");
    }
    manifest.files.push_back(std::move(file));
  }
}

}  // namespace

Manifest read_manifest(const std::filesystem::path& path) {
  return parse_manifest(read_text(path, kMaxManifestBytes, SymbolicLinks::refuse), path.string());
}

Manifest parse_manifest(std::string_view text, const std::string& origin) {
  const Json document = parse_json(text, origin);
  const JsonView root(document, origin);
  if (const auto format = root.find("format"); !format || format->json() != kManifestFormat)
    root.fail("is not a Tessera checkpoint's manifest (no \"format\": \"tessera-checkpoint\")");
  if (const auto version = root["format_version"].integer(); version != kManifestVersion)
    root.fail(detail::concat("format_version ", version, " is not ", kManifestVersion),
              "Another version of Tessera wrote this checkpoint; use that version.");
  if (root["checksum"].text() != checksum_of(document))
    root["checksum"].fail("does not match the manifest: it was altered or damaged");
  root.only({"format", "format_version", "tessera_version", "checksum", "step", "consumed_samples",
             "chunk_bytes", "files", "tensors", "config", "rng", "data", "user", "run"});
  Manifest manifest;
  manifest.state = {.step = root["step"].integer(),
                    .consumed_samples = root["consumed_samples"].integer(),
                    .tessera_version = root["tessera_version"].text(),
                    .config_json = to_text(root["config"].object(), -1),
                    .rng_json = to_text(root["rng"].json(), -1),
                    .data_json = to_text(root["data"].json(), -1),
                    .user_json = to_text(root["user"].json(), -1),
                    .run = root.find("run") ? root["run"].text() : ""};
  manifest.chunk_bytes = static_cast<std::uint64_t>(root["chunk_bytes"].integer(1, std::int64_t{1} << 32));
  parse_files(root["files"], manifest);
  const JsonView tensors = root["tensors"];
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    manifest.tensors.push_back(parse_tensor(tensors[i], manifest));
    if (i > 0 && manifest.tensors[i - 1].name >= manifest.tensors[i].name)
      tensors[i].fail("names are not sorted, or one appears twice");
  }
  return manifest;
}

std::string to_json(const Manifest& manifest) {
  Json files = Json::array();
  for (const auto& file : manifest.files) {
    files.push_back({{"name", file.name},
                     {"bytes", file.bytes},
                     {"header_bytes", file.header_bytes},
                     {"header_crc32", hex(file.header_crc32)}});
  }
  Json tensors = Json::array();
  for (const auto& tensor : manifest.tensors) tensors.push_back(to_json(tensor, manifest.files));
  Json root = {{"format", kManifestFormat},
               {"format_version", kManifestVersion},
               {"tessera_version", manifest.state.tessera_version},
               {"step", manifest.state.step},
               {"consumed_samples", manifest.state.consumed_samples},
               {"chunk_bytes", manifest.chunk_bytes},
               {"files", std::move(files)},
               {"tensors", std::move(tensors)},
               {"config", parse_blob(manifest.state.config_json, "config")},
               {"rng", parse_blob(manifest.state.rng_json, "rng")},
               {"data", parse_blob(manifest.state.data_json, "data")},
               {"user", parse_blob(manifest.state.user_json, "user")}};
  if (!manifest.state.run.empty()) root["run"] = manifest.state.run;
  TESSERA_CHECK(root["config"].is_object(), "a checkpoint's config must be a JSON object");
  root["checksum"] = checksum_of(root);
  return to_text(root, 1) + "\n";
}

void write_manifest(const Manifest& manifest, const std::filesystem::path& path) {
  write_text(path, to_json(manifest));
}

}  // namespace tessera
