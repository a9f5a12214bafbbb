#include <algorithm>
#include <set>
#include <unordered_map>

#include "checkpoint/file_io.hpp"
#include "checkpoint/hf_names.hpp"
#include "checkpoint/hf_storage.hpp"
#include "checkpoint/json_strict.hpp"
#include "checkpoint/slice_runs.hpp"
#include "checkpoint/tessera_folder.hpp"
#include "checkpoint/torch_folders.hpp"
#include "checkpoint/transpose.hpp"
#include "tessera/base/hash.hpp"
#include "tessera/checkpoint/hf.hpp"
#include "tessera/checkpoint/staged_directory.hpp"

namespace tessera {
namespace {

using namespace checkpoint_detail;
namespace fs = std::filesystem;

bool is_weight_dtype(DType dtype) {
  return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16;
}

/// Everything that does not fit, gathered before anything is said.
class Mismatches {
 public:
  std::vector<std::string> missing, unexpected, other_shape, other_dtype;

  void throw_if_any(const fs::path& dir) const {
    std::string text;
    const auto list = [&](const char* what, const std::vector<std::string>& lines) {
      if (lines.empty()) return;
      text += detail::concat(text.empty() ? "" : "; ", lines.size(), " ", what, ": ");
      for (std::size_t i = 0; i < lines.size(); ++i) text += (i ? ", " : "") + lines[i];
    };
    list("missing", missing);
    list("unexpected", unexpected);
    list("of another shape", other_shape);
    list("of an unsupported or mixed dtype", other_dtype);
    if (!text.empty())
      bad_file(dir, "the weights do not fit the model's configuration", text,
               "Check that configuration and weights belong together.");
  }
};

}  // namespace

struct HfModel::Impl {
  fs::path dir;
  Architecture config;
  std::optional<HfSource> source;
  std::unique_ptr<HfStorage> tensors;
  std::vector<HfMapping> mappings;
  std::unordered_map<std::string, const HfMapping*> by_name;

  Impl(fs::path folder, Architecture c, std::unique_ptr<HfStorage> storage)
      : dir(std::move(folder)), config(std::move(c)), tensors(std::move(storage)) {}

  /// A model in Hugging Face's form, compared with its configuration.
  static std::unique_ptr<Impl> checked(fs::path origin, std::string config_json,
                                       const std::string& config_origin, std::unique_ptr<HfStorage> storage);

  void take_mappings(std::vector<HfMapping> list) {
    mappings = std::move(list);
    for (const auto& mapping : mappings) by_name[mapping.name] = &mapping;
  }

  const HfMapping& mapping_of(const std::string& name) const {
    const auto it = by_name.find(name);
    if (it == by_name.end())
      bad_file(dir, "parameter '" + name + "'", "is not one of this model's",
               "Check the model's configuration.");
    return *it->second;
  }

  DType dtype_of(const HfMapping& mapping) const { return tensors->find(mapping.parts.front().name)->dtype; }

  /// Compares what is there with what the mappings need; `allowed` may be there besides.
  void check_tensors(const std::set<std::string>& allowed) const {
    Mismatches bad;
    std::set<std::string> wanted = allowed;
    for (const auto& mapping : mappings) {
      for (const auto& part : mapping.parts) {
        wanted.insert(part.name);
        const SafetensorsEntry* entry = tensors->find(part.name);
        if (!entry) {
          bad.missing.push_back(detail::concat(part.name, " ", part.shape));
        } else if (!(entry->shape == part.shape)) {
          bad.other_shape.push_back(
              detail::concat(part.name, " is ", entry->shape, ", the configuration implies ", part.shape));
        } else if (const SafetensorsEntry* first = tensors->find(mapping.parts.front().name);
                   !is_weight_dtype(entry->dtype) || (first && first->dtype != entry->dtype)) {
          bad.other_dtype.push_back(detail::concat(part.name, " ", entry->dtype));
        }
      }
    }
    for (const auto& entry : tensors->entries()) {
      if (!wanted.contains(entry.name))
        bad.unexpected.push_back(detail::concat(entry.name, " ", entry.shape));
    }
    bad.throw_if_any(dir);
  }

  /// Whether two tensors hold the same bytes.
  bool alike(const std::string& one, const std::string& other) const;
  void check_tied_copies() const;
  /// Where the weights say it: a head that is not there, or is the embedding, is tied to it.
  void settle_head(const std::string& prefix, const std::string& head);
  /// Reads a box of a parameter, contiguous, in the dtype it is stored in.
  void read_box(const HfMapping& mapping, const TensorSlice& box, std::span<std::byte> out) const;
  /// Reads a box of the rows that a part gives its parameter; `element`: bytes.
  void read_part(const HfPart& part, TensorSlice wanted, std::size_t element, std::span<std::byte> out) const;
  void describe_source(const std::string& prefix, const std::string& head, std::string config_json);
  std::uint64_t digest(const HfPart& part) const;
};

bool HfModel::Impl::alike(const std::string& first, const std::string& second) const {
  const SafetensorsEntry& a = *tensors->find(first);
  const SafetensorsEntry& b = *tensors->find(second);
  if (!(a.shape == b.shape) || a.dtype != b.dtype) return false;
  const std::int64_t rows = a.shape[0];
  const std::size_t row_bytes = static_cast<std::size_t>(a.shape[1]) * size_of(a.dtype);
  const std::int64_t step = std::max<std::int64_t>(1, static_cast<std::int64_t>((4u << 20) / row_bytes));
  std::vector<std::byte> one, two;
  for (std::int64_t row = 0; row < rows; row += step) {
    const TensorSlice slice = TensorSlice::rows(a.shape, row, std::min(rows, row + step));
    one.resize(static_cast<std::size_t>(slice.shape[0]) * row_bytes);
    two.resize(one.size());
    tensors->read_slice(first, slice, one);
    tensors->read_slice(second, slice, two);
    if (one != two) return false;
  }
  return true;
}

/// A tied head that is stored nevertheless must be the embedding, and so must its other copies: Hugging Face
/// would silently prefer one of them.
void HfModel::Impl::check_tied_copies() const {
  const auto& names = source->embedding_names;
  for (std::size_t i = 1; i < names.size(); ++i) {
    if (!alike(names[0], names[i]))
      bad_file(dir, "tensor '" + names[i] + "'",
               "differs from '" + names[0] + "' although tie_word_embeddings says they are one",
               "Set \"tie_word_embeddings\": false in config.json if the head is its own.");
  }
}

void HfModel::Impl::settle_head(const std::string& prefix, const std::string& head) {
  const ModelSpec& spec = naming_spec(config);
  if (!spec.head_by_weights || config.model.scaled_head.value_or(false)) return;
  const std::string embedding = prefix + spec.names.embedding + ".weight";
  config.model.tied_head =
      tensors->find(head) == nullptr || (tensors->find(embedding) != nullptr && alike(embedding, head));
}

void HfModel::Impl::describe_source(const std::string& prefix, const std::string& head,
                                    std::string config_json) {
  HfSource facts;
  facts.prefix = prefix;
  facts.config_json = std::move(config_json);
  tensors->describe(facts);
  for (const auto& entry : tensors->entries()) {
    if (!is_stored_buffer(naming_spec(config), prefix, entry.name)) continue;
    facts.ignored.push_back(entry.name);
    facts.weight_map.erase(entry.name);
  }
  const std::string embedding = mapping_of(kEmbedding).parts[0].name;
  if (tensors->find(embedding)) facts.embedding_names.push_back(embedding);
  for (const char* copy : naming_spec(config).names.embedding_copies) {
    const std::string name = prefix + copy + ".weight";
    if (tensors->find(name)) facts.embedding_names.push_back(name);
  }
  if (config.model.tied_head && tensors->find(head)) facts.embedding_names.push_back(head);
  if (facts.embedding_names.empty()) facts.embedding_names.push_back(embedding);
  source = std::move(facts);
}

HfModel::HfModel(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
HfModel::~HfModel() = default;
HfModel::HfModel(HfModel&&) noexcept = default;

const Architecture& HfModel::config() const { return impl_->config; }
const HfSource* HfModel::source() const { return impl_->source ? &*impl_->source : nullptr; }
const fs::path& HfModel::dir() const { return impl_->dir; }

std::vector<TensorSpec> HfModel::tensors() const {
  std::vector<TensorSpec> specs;
  for (const auto& mapping : impl_->mappings)
    specs.push_back({mapping.name, impl_->dtype_of(mapping), mapping.shape});
  return specs;
}

void HfModel::Impl::read_box(const HfMapping& mapping, const TensorSlice& box,
                             std::span<std::byte> out) const {
  const std::size_t element = size_of(dtype_of(mapping));
  std::int64_t row = 0;  // of the parameter, where the next part begins
  for (const HfPart& part : mapping.parts) {
    TensorSlice own = TensorSlice::whole(part.shape);
    if (part.transposed) std::swap(own.shape[0], own.shape[1]);
    own.offset[0] = row;
    row += own.shape[0];
    std::optional<TensorSlice> wanted = intersect(own, box);
    if (!wanted) continue;
    wanted->offset[0] -= own.offset[0];
    const std::size_t bytes = static_cast<std::size_t>(wanted->shape.numel()) * element;
    read_part(part, *wanted, element, out.first(bytes));
    out = out.subspan(bytes);
  }
}

void HfModel::Impl::read_part(const HfPart& part, TensorSlice wanted, std::size_t element,
                              std::span<std::byte> out) const {
  if (part.groups > 0) {
    const std::size_t row_bytes = static_cast<std::size_t>(wanted.shape.numel() / wanted.shape[0]) * element;
    for (std::int64_t row = wanted.offset[0], end = row + wanted.shape[0]; row < end;) {
      const std::int64_t rows = std::min(end - row, part.head_dim - row % part.head_dim);
      TensorSlice run = wanted;
      run.offset[0] = stored_row(part, row);
      run.shape[0] = rows;
      tensors->read_slice(part.name, run, out.first(static_cast<std::size_t>(rows) * row_bytes));
      out = out.subspan(static_cast<std::size_t>(rows) * row_bytes);
      row += rows;
    }
    return;
  }
  if (!part.transposed) return tensors->read_slice(part.name, wanted, out);
  std::swap(wanted.shape[0], wanted.shape[1]);
  std::swap(wanted.offset[0], wanted.offset[1]);
  for_row_blocks(wanted.shape, element, [&](std::int64_t row, std::int64_t rows, std::span<std::byte> block) {
    const TensorSlice slice{{wanted.offset[0] + row, wanted.offset[1]}, {rows, wanted.shape[1]}};
    tensors->read_slice(part.name, slice, block);
    put_rows_as_columns(block, out, wanted.shape, row, rows, element);
  });
}

void HfModel::read(const std::string& name, std::span<std::byte> out) const {
  const HfMapping& mapping = impl_->mapping_of(name);
  const std::size_t bytes =
      static_cast<std::size_t>(mapping.shape.numel()) * size_of(impl_->dtype_of(mapping));
  TESSERA_CHECK(out.size() == bytes, "parameter '", name, "': ", bytes, " bytes to read into a buffer of ",
                out.size());
  impl_->read_box(mapping, TensorSlice::whole(mapping.shape), out);
}

bool HfModel::read_box(const std::string& name, const TensorSlice& box, std::span<std::byte> out) const {
  const HfMapping& mapping = impl_->mapping_of(name);
  check_slice(name, mapping.shape, box);
  const std::size_t bytes = static_cast<std::size_t>(box.shape.numel()) * size_of(impl_->dtype_of(mapping));
  TESSERA_CHECK_EQ(out.size(), bytes, "bytes of a box of '", name, "'");
  impl_->read_box(mapping, box, out);
  return true;
}

void HfModel::read_f32(const std::string& name, std::span<float> out) const {
  read_f32(name, TensorSlice::whole(impl_->mapping_of(name).shape), out);
}

void HfModel::read_f32(const std::string& name, const TensorSlice& slice, std::span<float> out) const {
  const HfMapping& mapping = impl_->mapping_of(name);
  check_slice(name, mapping.shape, slice);
  TESSERA_CHECK_EQ(static_cast<std::int64_t>(out.size()), slice.shape.numel(), "elements of '", name, "'");
  const DType dtype = impl_->dtype_of(mapping);
  if (dtype == DType::f32) return impl_->read_box(mapping, slice, std::as_writable_bytes(out));
  std::vector<std::byte> stored(out.size() * size_of(dtype));
  impl_->read_box(mapping, slice, stored);
  convert_floats(dtype, stored, DType::f32, std::as_writable_bytes(out));
}

std::uint64_t HfModel::Impl::digest(const HfPart& part) const {
  const SafetensorsEntry& entry = *tensors->find(part.name);
  const std::uint64_t row_bytes =
      static_cast<std::uint64_t>(entry.shape.numel() / std::max<std::int64_t>(1, entry.shape[0])) *
      size_of(entry.dtype);
  const bool whole = tensors->in_memory();
  const std::uint64_t block = whole ? 1u << 20 : 1u << 14;
  const std::int64_t rows =
      std::max<std::int64_t>(1, static_cast<std::int64_t>(block / std::max<std::uint64_t>(1, row_bytes)));
  const std::int64_t blocks = (entry.shape[0] + rows - 1) / rows;
  const std::int64_t wanted = whole ? blocks : std::min<std::int64_t>(blocks, 16);
  std::uint64_t hash =
      content_hash(std::as_bytes(std::span(part.name)), static_cast<std::uint64_t>(entry.dtype));
  std::vector<std::byte> bytes;
  for (std::int64_t i = 0; i < wanted; ++i) {
    const std::int64_t row = (wanted == 1 ? 0 : i * (blocks - 1) / (wanted - 1)) * rows;
    const TensorSlice slice = TensorSlice::rows(entry.shape, row, std::min(entry.shape[0], row + rows));
    bytes.resize(static_cast<std::size_t>(slice.shape[0]) * row_bytes);
    tensors->read_slice(part.name, slice, bytes);
    hash = content_hash(bytes, hash);
  }
  return hash;
}

std::vector<std::uint64_t> HfModel::digests() const {
  std::vector<std::uint64_t> list;
  for (const HfMapping& mapping : impl_->mappings) {
    for (const HfPart& part : mapping.parts) list.push_back(impl_->digest(part));
  }
  return list;
}

std::unique_ptr<HfModel::Impl> HfModel::Impl::checked(fs::path origin, std::string config_json,
                                                      const std::string& config_origin,
                                                      std::unique_ptr<HfStorage> storage) {
  Architecture config = parse_architecture(config_json, config_origin);
  auto impl = std::make_unique<Impl>(std::move(origin), std::move(config), std::move(storage));
  const ModelSpec& spec = naming_spec(impl->config);
  const std::string usual = spec.names.prefix;
  const auto& entries = impl->tensors->entries();
  const bool prefixed = std::any_of(entries.begin(), entries.end(),
                                    [&](const auto& entry) { return entry.name.starts_with(usual); });
  const std::string prefix = prefixed ? usual : "";
  const std::string head = impl->tensors->find(head_name(spec)) ? head_name(spec) : stored_head_name(spec);
  impl->settle_head(prefix, head);
  impl->take_mappings(map_names(impl->config, prefix, head));
  if (impl->config.model.num_experts)
    impl->tensors = as_files(std::move(impl->tensors), impl->mappings,
                             map_names(impl->config, prefix, head, HfForm::modules));
  impl->describe_source(prefix, head, std::move(config_json));
  std::set<std::string> allowed(impl->source->ignored.begin(), impl->source->ignored.end());
  allowed.insert(impl->source->embedding_names.begin(), impl->source->embedding_names.end());
  impl->mappings.front().parts.front().name = impl->source->embedding_names.front();
  impl->check_tensors(allowed);
  impl->check_tied_copies();
  return impl;
}

HfModel open_hf(const fs::path& dir, SymbolicLinks links) {
  settle_directory(dir);
  const fs::path config_path = dir / "config.json";
  std::string text = read_text(config_path, kMaxConfigBytes, links);
  return HfModel(HfModel::Impl::checked(dir, std::move(text), config_path.string(), files_of(dir, links)));
}

fs::path config_of(const fs::path& weights, const fs::path& named) {
  if (!named.empty()) return fs::is_directory(named) ? named / "config.json" : named;
  const fs::path real = fs::weakly_canonical(weights);
  for (const fs::path& folder : {real, real.parent_path()}) {
    if (fs::exists(folder / "config.json")) return folder / "config.json";
  }
  bad_file(weights, "", "has no config.json, nor has the folder above it",
           "Name the model's configuration: a config.json of Transformers, or its folder.");
}

namespace {

/// A model's tensors of one kind.
std::unique_ptr<HfStorage> torch_storage(TorchFormat format, const fs::path& dir, const ModelSpec& spec,
                                         RunValue value, TorchFacts& facts, SymbolicLinks links) {
  if (format == TorchFormat::accelerate) {
    if (value == RunValue::weight) return accelerate_storage(dir, spec, links, facts);
    const auto [inner, folder] = accelerate_moments(dir);
    return torch_storage(inner, folder, spec, value, facts, links);
  }
  std::vector<PartedTensor> tensors = format == TorchFormat::dcp
                                          ? dcp_tensors(dir, links, facts, value)
                                          : deepspeed_tensors(dir, links, facts, value);
  if (tensors.empty() && value != RunValue::weight)
    bad_file(dir, "", detail::concat("holds no '", torch_name(value), "' of an optimizer"),
             "Convert the weights alone, without --with_optimizer.");
  return parts_of(std::move(tensors), spec, dir, facts.notes);
}

}  // namespace

HfModel open_torch(TorchFormat format, const fs::path& dir, const fs::path& config, TorchFacts& facts,
                   SymbolicLinks links, RunValue value) {
  std::string text = read_text(config, kMaxConfigBytes, links);
  const ModelSpec& spec = naming_spec(parse_architecture(text, config.string()));
  auto storage = torch_storage(format, dir, spec, value, facts, links);
  return HfModel(HfModel::Impl::checked(dir, std::move(text), config.string(), std::move(storage)));
}

HfModel hf_in_memory(const std::string& architecture, std::vector<TensorView> tensors) {
  return HfModel(HfModel::Impl::checked("the model's state_dict", architecture, "the model's config",
                                        memory_of(std::move(tensors))));
}

HfModel open_tessera(const fs::path& dir, SymbolicLinks links) {
  settle_directory(dir);
  TesseraFolder folder = read_tessera_json(dir, links);
  auto impl = std::make_unique<HfModel::Impl>(dir, std::move(folder.config), files_of(dir, links));
  impl->source = std::move(folder.source);
  std::vector<HfMapping> identity;
  for (const TensorSpec& spec : parameter_specs(impl->config))
    identity.push_back({spec.name, spec.shape, {{spec.name, spec.shape, false}}});
  impl->take_mappings(std::move(identity));
  impl->check_tensors({});
  return HfModel(std::move(impl));
}

ModelDescription read_model_description(const fs::path& dir, SymbolicLinks links) {
  settle_directory(dir);
  std::error_code error;
  const bool ours = fs::exists(dir / kTesseraJson, error);
  return {ours, read_text(dir / (ours ? kTesseraJson : "config.json"), kMaxTesseraJsonBytes, links)};
}

bool is_model_folder(const fs::path& dir) {
  settle_directory(dir);
  std::error_code error;
  return fs::exists(dir / kTesseraJson, error) || fs::exists(dir / "config.json", error);
}

HfModel open_model(const fs::path& dir, SymbolicLinks links) {
  settle_directory(dir);
  std::error_code error;
  if (fs::exists(dir / kTesseraJson, error)) return open_tessera(dir, links);
  if (!fs::exists(dir / "config.json", error))
    bad_file(dir, "", "has neither tessera.json nor config.json",
             "Name a folder written by Tessera or Hugging Face.");
  return open_hf(dir, links);
}

}  // namespace tessera
