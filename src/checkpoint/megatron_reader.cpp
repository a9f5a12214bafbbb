#include <algorithm>
#include <map>
#include <set>

#include "checkpoint/file_io.hpp"
#include "checkpoint/megatron_args.hpp"
#include "checkpoint/megatron_names.hpp"
#include "checkpoint/torch_file.hpp"
#include "tessera/base/config_file.hpp"
#include "tessera/checkpoint/megatron.hpp"

namespace tessera {
namespace {

using namespace checkpoint_detail;
namespace fs = std::filesystem;
using Kind = PickleValue::Kind;

constexpr const char* kTracker = "latest_checkpointed_iteration.txt";
constexpr const char* kRemedy = "Check that the folder is a whole checkpoint of Megatron-LM.";

/// The folder of one iteration: `dir` itself, or the one that its tracker names.
fs::path iteration_folder(const fs::path& dir, SymbolicLinks links) {
  std::error_code error;
  if (!fs::exists(dir / kTracker, error)) return dir;
  std::string text = read_text(dir / kTracker, 64, links);
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back()))) text.pop_back();
  if (text == "release") return dir / text;
  if (text.empty() || text.size() > 12 || text.find_first_not_of("0123456789") != std::string::npos)
    bad_file(dir / kTracker, "", "it names neither an iteration nor 'release'", kRemedy);
  return dir / ("iter_" + zero_filled(std::stoll(text), 7));
}

/// The file of a rank's weights; nothing where there is none. The distributed optimizer of 2022 and 2023 had
/// folders of data ranks, the first of which has the weights.
std::optional<fs::path> rank_file(const fs::path& dir, std::int64_t tp, std::optional<std::int64_t> pp) {
  const std::string plain = rank_folder(tp, pp);
  std::error_code error;
  for (const std::string& folder : {plain, plain + "_000"}) {
    for (const char* name : {"model_optim_rng.pt", "model_rng.pt"}) {
      if (fs::exists(dir / folder / name, error)) return dir / folder / name;
    }
  }
  return std::nullopt;
}

/// A piece of a model: what a rank's file has under `model`, or under `model0`, `model1`, ... with virtual
/// stages.
struct Chunk {
  const TorchFile* file = nullptr;
  std::map<std::string, TorchTensor> tensors;  ///< by names as they are there
};

/// Adds every tensor below `value`, by its path of keys.
void flatten(const TorchFile& file, const PickleValue& value, const std::string& prefix, int depth,
             Chunk& out) {
  if (const auto tensor = file.tensor(value)) {
    out.tensors[prefix] = *tensor;
    return;
  }
  if (!value.is(Kind::dict) || depth > 16) return;
  for (const auto& [key, each] : value.entries) {
    if (key->is(Kind::text))
      flatten(file, *each, prefix.empty() ? key->text : prefix + "." + key->text, depth + 1, out);
  }
}

std::int64_t whole_number(const PickleValue* value) {
  return value && value->is(Kind::integer) ? value->integer : 0;
}

}  // namespace

struct MegatronModel::Impl {
  /// One tensor: its parts by tensor rank.
  struct Stored {
    std::vector<std::pair<const TorchFile*, TorchTensor>> ranks;
    Shape shape;                   ///< of the whole
    const Stored* copy = nullptr;  ///< of an embedding: what the last stage has of it
  };

  fs::path dir;
  Architecture architecture;
  std::int64_t iteration = 0, tensor = 1, version = 0;
  std::vector<std::string> notes;
  std::vector<std::unique_ptr<TorchFile>> files;
  std::map<std::string, Stored> stored;
  Stored head_copy;

  void load(const MegatronReadOptions& options);
  std::vector<Chunk> read_rank(std::int64_t tp, std::optional<std::int64_t> pp, const MegatronArgs& args,
                               bool first, SymbolicLinks links);
  void take(const Chunk& chunk, std::int64_t first_layer, bool tied, std::set<std::string>& unexpected);
  void check(const std::set<std::string>& unexpected);
  void settle_vocabulary(const MegatronArgs& args, const MegatronReadOptions& options);
  void note_rest(const PickleValue& root);

  void read(const Stored& from, TensorSplit split, std::span<std::byte> out) const;
  void read_same(const Stored& from, std::span<std::byte> out) const;
  void read_vocabulary(const Stored& from, std::span<std::byte> out) const;
  void read_columns(const Stored& from, std::span<std::byte> out) const;
  void read_rows(const Stored& from, std::int64_t halves, std::span<std::byte> out) const;
  void read_query_key_value(const Stored& from, std::span<std::byte> out) const;
  std::vector<std::byte> local(const Stored& from, std::size_t rank) const;
};

void MegatronModel::Impl::load(const MegatronReadOptions& options) {
  dir = iteration_folder(dir, options.links);
  std::error_code error;
  if (fs::exists(dir / "metadata.json", error))
    bad_file(dir, "", "it is of the format torch_dist",
             "Load it in Megatron and save it with --ckpt-convert-format torch.");
  // Whether there are stages is known from the first rank's arguments only; its folder is found either way.
  const std::optional<fs::path> path = rank_file(dir, 0, std::nullopt);
  if (!path) bad_file(dir, "", "there is no mp_rank_00/model_optim_rng.pt and no mp_rank_00_000", kRemedy);
  const TorchFile first(*path, options.links);
  const PickleValue* given = first.root().find("args");
  if (!given)
    bad_file(*path, "args", "are missing: sizes and activation of the model are not known", kRemedy);
  const MegatronArgs args = read_megatron_args(*given, *path);
  tensor = args.tensor;
  if (tensor < 1 || tensor > 99999 || args.pipeline < 1 || args.pipeline > 99999 || args.virtual_stages < 1 ||
      args.virtual_stages > args.model.num_layers)
    bad_file(*path, "args", "have no proper numbers of ranks", kRemedy);
  if (args.pipeline > 1 && !rank_file(dir, 0, 0))
    bad_file(*path, "args.pipeline_model_parallel_size",
             detail::concat("is ", args.pipeline, ", but there is no mp_rank_00_000"), kRemedy);
  if (rank_file(dir, tensor, args.pipeline > 1 ? std::optional<std::int64_t>(0) : std::nullopt) ||
      rank_file(dir, 0, args.pipeline))
    bad_file(dir, "",
             detail::concat("there are more ranks than its arguments say: ", tensor, " tensor ranks and ",
                            args.pipeline, " stages"),
             kRemedy);
  architecture.model = args.model;
  const bool tied = *args.model.tied_head;
  std::set<std::string> unexpected;
  for (std::int64_t tp = 0; tp < tensor; ++tp) {
    std::vector<std::vector<Chunk>> stages;
    for (std::int64_t pp = 0; pp < args.pipeline; ++pp)
      stages.push_back(read_rank(tp, args.pipeline > 1 ? std::optional(pp) : std::nullopt, args, tp + pp == 0,
                                 options.links));
    std::int64_t first_layer = 0;
    for (std::int64_t chunk = 0; chunk < args.virtual_stages; ++chunk) {
      for (const std::vector<Chunk>& stage : stages) {
        const Chunk& piece = stage[static_cast<std::size_t>(chunk)];
        std::int64_t layers = 0;
        for (const auto& [name, each] : piece.tensors) {
          if (const auto known = megatron_name(name))
            layers = std::max(layers, layer_name(known->ours).layer + 1);
        }
        take(piece, first_layer, tied, unexpected);
        first_layer += layers;
      }
    }
    if (first_layer != args.model.num_layers)
      bad_file(dir, "layers",
               detail::concat("there are ", first_layer, ", the arguments say ", args.model.num_layers),
               kRemedy);
  }
  settle_vocabulary(args, options);
  check(unexpected);
  note_rest(first.root());
}

std::vector<Chunk> MegatronModel::Impl::read_rank(std::int64_t tp, std::optional<std::int64_t> pp,
                                                  const MegatronArgs& args, bool first, SymbolicLinks links) {
  const std::optional<fs::path> path = rank_file(dir, tp, pp);
  if (!path)
    bad_file(dir, "",
             detail::concat("tensor rank ", tp, pp ? detail::concat(", stage ", *pp) : "", " of ",
                            args.tensor, " x ", args.pipeline, " is missing"),
             kRemedy);
  files.push_back(std::make_unique<TorchFile>(*path, links));
  const TorchFile& file = *files.back();
  const PickleValue& root = file.root();
  const PickleValue* number = root.find("iteration");
  const std::int64_t own = whole_number(number ? number : root.find("total_iters"));
  const PickleValue* stored_version = root.find("checkpoint_version");
  const auto own_version = static_cast<std::int64_t>(!stored_version ? 0
                                                     : stored_version->is(Kind::real)
                                                         ? stored_version->real
                                                         : static_cast<double>(stored_version->integer));
  if (first) {
    iteration = own;
    version = own_version;
    if (version < 0 || version > 3)
      bad_file(*path, "checkpoint_version", detail::concat(version, " is not read; 0 to 3 are"), kRemedy);
  } else if (own != iteration || own_version != version) {
    bad_file(*path, "iteration",
             detail::concat("is ", own, " (version ", own_version, "), that of the first rank ", iteration,
                            " (version ", version, ")"),
             "All ranks' files have to be of one checkpoint.");
  }
  std::vector<Chunk> chunks;
  for (std::int64_t i = 0; i < args.virtual_stages; ++i) {
    const std::string key = args.virtual_stages == 1 ? "model" : "model" + std::to_string(i);
    const PickleValue* model = root.find(key);
    if (!model) bad_file(*path, key, "is missing", kRemedy);
    Chunk& chunk = chunks.emplace_back();
    chunk.file = &file;
    flatten(file, *model, "", 0, chunk);
  }
  return chunks;
}

/// Adds a chunk's tensors, whose layers are numbered from `first_layer` on.
void MegatronModel::Impl::take(const Chunk& chunk, std::int64_t first_layer, bool tied,
                               std::set<std::string>& unexpected) {
  for (const auto& [name, each] : chunk.tensors) {
    const std::optional<MegatronName> known = megatron_name(name);
    if (!known) {
      unexpected.insert(name + " " + each.describe());
      continue;
    }
    if (known->ignored) continue;
    const LayerName layer = layer_name(known->ours);
    const std::string ours =
        layer.layer < 0 ? known->ours : with_layer(first_layer + layer.layer, layer.rest);
    Stored& to = tied && known->tied_copy ? head_copy : stored[ours];
    to.ranks.emplace_back(chunk.file, each);
  }
}

void MegatronModel::Impl::settle_vocabulary(const MegatronArgs& args, const MegatronReadOptions& options) {
  const auto it = stored.find("embedding.word_embeddings.weight");
  std::int64_t rows = 0;
  if (it != stored.end()) {
    for (const auto& [file, each] : it->second.ranks) rows += each.shape.empty() ? 0 : each.shape[0];
  }
  const std::int64_t wanted = options.vocab_size.value_or(args.true_vocab);
  if (wanted > rows && rows > 0)
    bad_file(dir, "embedding.word_embeddings.weight",
             detail::concat("has ", rows, " rows; the vocabulary has ", wanted),
             "Give the size of the vocabulary that it was trained with.");
  architecture.model.vocab_size = wanted > 0 ? wanted : rows;
  if (wanted > 0 && wanted < rows)
    notes.push_back(detail::concat(rows - wanted, " rows of padding of the vocabulary are left out"));
  if (wanted == 0)
    notes.push_back(detail::concat("the arguments do not say how many of the ", rows,
                                   " rows of the vocabulary are padding: all are kept"));
  architecture = architecture_of(resolve(architecture.model));
}

/// Compares what is there with what the model has.
void MegatronModel::Impl::check(const std::set<std::string>& unexpected) {
  std::string problems;
  const auto add = [&](const std::string& text) { problems += (problems.empty() ? "" : "; ") + text; };
  std::set<std::string> left;
  for (const auto& [name, each] : stored) left.insert(name);
  const ModelConfig& m = architecture.model;
  if (m.num_heads % m.num_kv_heads != 0 || m.num_kv_heads % tensor != 0)
    add(detail::concat(m.num_heads, " heads and ", m.num_kv_heads, " groups of them for ", tensor,
                       " tensor ranks"));
  for (const TensorSpec& spec : parameter_specs(architecture)) {
    const auto it = stored.find(spec.name);
    if (it == stored.end()) {
      add(detail::concat("missing: ", spec.name, " ", spec.shape));
      continue;
    }
    left.erase(spec.name);
    it->second.shape = spec.shape;
    const TensorSplit split = tensor_split(spec.name);
    if (static_cast<std::int64_t>(it->second.ranks.size()) != tensor)
      add(detail::concat(spec.name, " is there ", it->second.ranks.size(), " times, not on each of ", tensor,
                         " tensor ranks"));
    std::vector<std::int64_t> wanted;
    for (int i = 0; i < spec.shape.rank(); ++i) wanted.push_back(spec.shape[i]);
    if (split == TensorSplit::columns) wanted[1] /= tensor;
    if (split == TensorSplit::query_key_value || split == TensorSplit::gate_up) wanted[0] /= tensor;
    for (const auto& [file, each] : it->second.ranks) {
      if (split == TensorSplit::vocabulary && each.shape.size() == 2) wanted[0] = each.shape[0];
      if (each.shape != wanted || each.dtype != it->second.ranks.front().second.dtype)
        add(detail::concat(spec.name, " is ", each.describe(), " in ", file->path().string(),
                           "; the arguments imply ", spec.shape, " over ", tensor,
                           " tensor ranks in one type"));
    }
  }
  for (const std::string& name : left) add("unexpected: " + name);
  for (const std::string& name : unexpected) add("unexpected: " + name);
  if (!problems.empty())
    bad_file(dir, "the weights do not fit the model's arguments", problems,
             "Models of GPT's and Llama's kind are read.");
  if (head_copy.ranks.size() == static_cast<std::size_t>(tensor)) {
    Stored& embedding = stored.at("embedding.word_embeddings.weight");
    head_copy.shape = embedding.shape;
    embedding.copy = &head_copy;
  }
}

void MegatronModel::Impl::note_rest(const PickleValue& root) {
  const PickleValue* optimizer = root.find("optimizer");
  if (optimizer && !optimizer->is(Kind::none)) notes.push_back("the optimizer's state is left out");
  if (root.find("opt_param_scheduler") || root.find("lr_scheduler"))
    notes.push_back("the state of the learning rate's schedule is left out");
  if (iteration > 0)
    notes.push_back(detail::concat("the count of iterations (", iteration,
                                   ") is left out: a run from these weights begins at step 0"));
  if (root.find("rng_state")) notes.push_back("states of random numbers are left out");
}

std::vector<std::byte> MegatronModel::Impl::local(const Stored& from, std::size_t rank) const {
  const auto& [file, each] = from.ranks[rank];
  std::vector<std::byte> bytes(static_cast<std::size_t>(each.numel()) * size_of(each.dtype));
  file->read(each, bytes);
  return bytes;
}

void MegatronModel::Impl::read_same(const Stored& from, std::span<std::byte> out) const {
  from.ranks[0].first->read(from.ranks[0].second, out);
  for (std::size_t rank = 1; rank < from.ranks.size(); ++rank) {
    const std::vector<std::byte> other = local(from, rank);
    if (!std::equal(other.begin(), other.end(), out.begin(), out.end()))
      bad_file(from.ranks[rank].first->path(), "a tensor that all ranks have",
               "differs from that of tensor rank 0",
               "The files are of different runs, or the run had gone astray.");
  }
}

void MegatronModel::Impl::read_vocabulary(const Stored& from, std::span<std::byte> out) const {
  const std::size_t row = static_cast<std::size_t>(from.shape[1]) * size_of(from.ranks[0].second.dtype);
  std::vector<std::byte> copy;
  for (std::size_t rank = 0; rank < from.ranks.size() && !out.empty(); ++rank) {
    const auto& [file, each] = from.ranks[rank];
    const std::int64_t rows = std::min(each.shape[0], static_cast<std::int64_t>(out.size() / row));
    const std::span<std::byte> part = out.first(static_cast<std::size_t>(rows) * row);
    file->read_rows(each, 0, rows, part);
    if (from.copy) {
      copy.resize(part.size());
      const auto& [copy_file, copied] = from.copy->ranks[rank];
      if (copied.shape != each.shape || copied.dtype != each.dtype)
        bad_file(copy_file->path(), "the head", "is no copy of the embedding, as that of a tied model is",
                 kRemedy);
      copy_file->read_rows(copied, 0, rows, copy);
      if (!std::equal(copy.begin(), copy.end(), part.begin()))
        bad_file(copy_file->path(), "the head", "differs from the embedding, although the model is tied",
                 kRemedy);
    }
    out = out.subspan(part.size());
  }
  TESSERA_CHECK(out.empty(), "the vocabulary has more rows than the checkpoint");
}

void MegatronModel::Impl::read_columns(const Stored& from, std::span<std::byte> out) const {
  const std::size_t whole = static_cast<std::size_t>(from.shape[1]) * size_of(from.ranks[0].second.dtype);
  const std::size_t part = whole / from.ranks.size();
  for (std::size_t rank = 0; rank < from.ranks.size(); ++rank) {
    const std::vector<std::byte> own = local(from, rank);
    for (std::size_t row = 0; row * part < own.size(); ++row)
      std::copy_n(own.data() + row * part, part, out.data() + row * whole + rank * part);
  }
}

/// Rows one rank after the other, in each of `halves` parts.
void MegatronModel::Impl::read_rows(const Stored& from, std::int64_t halves, std::span<std::byte> out) const {
  const std::size_t parts = static_cast<std::size_t>(halves),
                    block = out.size() / (from.ranks.size() * parts);
  for (std::size_t rank = 0; rank < from.ranks.size(); ++rank) {
    const std::vector<std::byte> own = local(from, rank);
    for (std::size_t half = 0; half < parts; ++half)
      std::copy_n(own.data() + half * block, block, out.data() + (half * from.ranks.size() + rank) * block);
  }
}

/// To all queries, all keys, all values, from what each version has: 0 these three by rank, 1 by head and
/// feature, 2 and 3 by head (by group of heads with its key and value).
void MegatronModel::Impl::read_query_key_value(const Stored& from, std::span<std::byte> out) const {
  const ModelConfig& m = architecture.model;
  const auto ranks = static_cast<std::int64_t>(from.ranks.size());
  const std::int64_t rows = from.shape[0], heads = rows / m.head_dim, own = heads / ranks, per_kind = own / 3;
  const std::size_t row = out.size() / static_cast<std::size_t>(rows);
  const HfPart grouped{"", Shape{rows}, false, m.num_kv_heads, m.head_dim};
  std::vector<std::vector<std::byte>> parts;
  for (std::size_t rank = 0; rank < from.ranks.size(); ++rank) parts.push_back(local(from, rank));
  for (std::int64_t head = 0; head < heads; ++head) {
    const std::int64_t stored_head = stored_row(grouped, head * m.head_dim) / m.head_dim;  // over all ranks
    const auto rank = static_cast<std::size_t>(stored_head / own);
    const std::int64_t place = stored_head % own;  // of [heads of this rank, 3] where there are no groups
    for (std::int64_t feature = 0; feature < m.head_dim; ++feature) {
      std::int64_t at = place * m.head_dim + feature;
      if (version == 0) at = (place % 3 * per_kind + place / 3) * m.head_dim + feature;
      if (version == 1) at = (place / 3 * m.head_dim + feature) * 3 + place % 3;
      std::copy_n(parts[rank].data() + static_cast<std::size_t>(at) * row, row,
                  out.data() + static_cast<std::size_t>(head * m.head_dim + feature) * row);
    }
  }
}

void MegatronModel::Impl::read(const Stored& from, TensorSplit split, std::span<std::byte> out) const {
  switch (split) {
    case TensorSplit::none:
      return read_same(from, out);
    case TensorSplit::vocabulary:
      return read_vocabulary(from, out);
    case TensorSplit::columns:
      return read_columns(from, out);
    case TensorSplit::gate_up:
      return read_rows(from, architecture.model.activation == MlpActivation::swiglu ? 2 : 1, out);
    case TensorSplit::query_key_value:
      return read_query_key_value(from, out);
  }
}

MegatronModel::MegatronModel(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
MegatronModel::~MegatronModel() = default;
MegatronModel::MegatronModel(MegatronModel&&) noexcept = default;

const Architecture& MegatronModel::config() const { return impl_->architecture; }
std::int64_t MegatronModel::iteration() const { return impl_->iteration; }
const std::vector<std::string>& MegatronModel::notes() const { return impl_->notes; }

std::vector<TensorSpec> MegatronModel::tensors() const {
  std::vector<TensorSpec> specs;
  for (TensorSpec spec : parameter_specs(impl_->architecture)) {
    spec.dtype = impl_->stored.at(spec.name).ranks.front().second.dtype;
    specs.push_back(std::move(spec));
  }
  return specs;
}

void MegatronModel::read(const std::string& name, std::span<std::byte> out) const {
  const auto it = impl_->stored.find(name);
  TESSERA_CHECK(it != impl_->stored.end(), "there is no tensor '", name, "'");
  TESSERA_CHECK_EQ(
      out.size(),
      static_cast<std::size_t>(it->second.shape.numel()) * size_of(it->second.ranks[0].second.dtype),
      "bytes of '", name, "'");
  impl_->read(it->second, tensor_split(name), out);
}

MegatronModel open_megatron(const fs::path& dir, const MegatronReadOptions& options) {
  auto impl = std::make_unique<MegatronModel::Impl>();
  impl->dir = dir;
  impl->load(options);
  return MegatronModel(std::move(impl));
}

}  // namespace tessera
