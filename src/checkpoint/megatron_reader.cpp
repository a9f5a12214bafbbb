#include <algorithm>

#include "checkpoint/file_io.hpp"
#include "checkpoint/hf_names.hpp"
#include "checkpoint/megatron_model.hpp"
#include "checkpoint/slice_runs.hpp"
#include "tessera/base/families.hpp"

namespace tessera {

using namespace checkpoint_detail;
namespace fs = std::filesystem;
using Kind = PickleValue::Kind;

namespace {

constexpr const char* kTracker = "latest_checkpointed_iteration.txt";

/// The folder of one iteration: `dir` itself, or the one that its tracker names.
fs::path iteration_folder(const fs::path& dir, SymbolicLinks links) {
  std::error_code error;
  if (!fs::exists(dir / kTracker, error)) return dir;
  std::string text = read_text(dir / kTracker, 64, links);
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back()))) text.pop_back();
  if (text == "release") return dir / text;
  if (text.empty() || text.size() > 12 || text.find_first_not_of("0123456789") != std::string::npos)
    bad_file(dir / kTracker, "", "it names neither an iteration nor 'release'", kWholeMegatron);
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

/// Adds every tensor below `value`, by its path of keys.
void flatten(const TorchFile& file, const PickleValue& value, const std::string& prefix, int depth,
             MegatronChunk& out) {
  if (const auto tensor = file.tensor(value)) {
    out.tensors.emplace_back(prefix, *tensor);
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

std::int64_t iteration_of(const PickleValue& root) {
  const PickleValue* number = root.find("iteration");
  return whole_number(number ? number : root.find("total_iters"));
}

/// -1 for what no version is.
std::int64_t version_of(const PickleValue& root) {
  const PickleValue* stored = root.find("checkpoint_version");
  if (!stored) return 0;
  if (stored->is(Kind::integer)) return stored->integer;
  constexpr double kMost = 1e6;
  return stored->is(Kind::real) && stored->real >= 0 && stored->real < kMost
             ? static_cast<std::int64_t>(stored->real)
             : -1;
}

}  // namespace

void MegatronModel::Impl::take_version(const TorchFile& file) {
  iteration = iteration_of(file.root());
  version = version_of(file.root());
  if (version < 0 || version > 3)
    bad_file(file.path(), "checkpoint_version", detail::concat(version, " is not read; 0 to 3 are"),
             kWholeMegatron);
}

/// The folder has the ranks that the arguments of its first one, in `path`, say, and no more.
void MegatronModel::Impl::check_ranks(const MegatronArgs& args, const fs::path& path) const {
  if (args.tensor < 1 || args.tensor > 99999 || args.pipeline < 1 || args.pipeline > 99999 ||
      args.virtual_stages < 1 || args.virtual_stages > args.model.num_layers)
    bad_file(path, "args", "have no proper numbers of ranks", kWholeMegatron);
  if (args.pipeline > 1 && !rank_file(dir, 0, 0))
    bad_file(path, "args.pipeline_model_parallel_size",
             detail::concat("is ", args.pipeline, ", but there is no mp_rank_00_000"), kWholeMegatron);
  if (rank_file(dir, args.tensor, args.pipeline > 1 ? std::optional<std::int64_t>(0) : std::nullopt) ||
      rank_file(dir, 0, args.pipeline))
    bad_file(dir, "",
             detail::concat("there are more ranks than its arguments say: ", args.tensor,
                            " tensor ranks and ", args.pipeline, " stages"),
             kWholeMegatron);
}

void MegatronModel::Impl::load(const MegatronReadOptions& options, bool with_run) {
  dir = iteration_folder(dir, options.links);
  std::error_code error;
  const bool distributed = fs::exists(dir / ".metadata", error);  // the format torch_dist
  // Whether there are stages is known from the first rank's arguments only; its folder is found either way.
  const std::optional<fs::path> path = distributed ? dir / "common.pt" : rank_file(dir, 0, std::nullopt);
  if (!path)
    bad_file(dir, "",
             "there is no mp_rank_00/model_optim_rng.pt, no mp_rank_00_000 and, as torch_dist would have, no "
             ".metadata",
             kWholeMegatron);
  const TorchFile first(*path, options.links);
  const PickleValue* given = first.root().find("args");
  if (!given)
    bad_file(*path, "args", "are missing: sizes and activation of the model are not known", kWholeMegatron);
  const MegatronArgs args = read_megatron_args(*given, *path);
  if (!distributed) {
    check_ranks(args, *path);
    tensor = args.tensor;
    pipeline = args.pipeline;
  }
  data = args.data;
  settings = args.model;
  if (with_run) {
    run.emplace();
    run->training = read_megatron_training(first.root(), *path, notes);
  }
  std::set<std::string> unexpected;
  if (distributed) {
    read_distributed(first, args, options.links, unexpected);
  } else {
    for (std::int64_t tp = 0; tp < tensor; ++tp) read_tensor_rank(tp, args, options.links, unexpected);
  }
  settle_family(args);
  settle_vocabulary(args, options);
  check(unexpected);
  if (run) {
    if (distributed) check_distributed_run();
    settle_run();
    check_schedule(first.root(), *path, run->config, run->training.counters);
  } else {
    note_rest(first.root());
  }
  if (first.root().find("rng_state")) notes.push_back("states of random numbers are left out");
}

/// All stages of a tensor rank. Layers are counted in the order in which the model runs through virtual
/// stages.
void MegatronModel::Impl::read_tensor_rank(std::int64_t tp, const MegatronArgs& args, SymbolicLinks links,
                                           std::set<std::string>& unexpected) {
  const bool tied = *args.model.tied_head;
  std::vector<std::vector<Chunk>> stages;
  std::vector<std::array<std::vector<Chunk>, 3>> states;
  for (std::int64_t pp = 0; pp < args.pipeline; ++pp) {
    stages.push_back(
        read_rank(tp, args.pipeline > 1 ? std::optional(pp) : std::nullopt, args, tp + pp == 0, links));
    for (const Chunk& chunk : stages.back()) {
      for (const auto& [name, each] : chunk.tensors) {
        if (reads_encoder(name)) take_two_stacks(args);
      }
    }
    if (run) take_optimizer(stages.back(), pp, states.emplace_back(), links);
  }
  std::int64_t first_layer = 0;
  for (std::size_t chunk = 0; chunk < static_cast<std::size_t>(args.virtual_stages); ++chunk) {
    for (std::size_t pp = 0; pp < stages.size(); ++pp) {
      const Chunk& piece = stages[pp][chunk];
      std::int64_t layers = 0;
      for (const auto& [name, each] : piece.tensors) {
        const auto known = two_stacks ? std::nullopt : megatron_name(name, false);
        if (known) layers = std::max(layers, layer_name(known->ours).layer + 1);
      }
      take(piece, first_layer, tied, weights, unexpected);
      for (std::size_t value = 0; run && value < 3; ++value)
        take(states[pp][value][chunk], first_layer, tied, run->values[value], unexpected);
      first_layer += layers;
    }
  }
  if (!two_stacks && first_layer != args.model.num_layers)
    bad_file(dir, "layers",
             detail::concat("there are ", first_layer, ", the arguments say ", args.model.num_layers),
             kWholeMegatron);
}

/// The model is Megatron's T5, which the arguments do not say.
void MegatronModel::Impl::take_two_stacks(const MegatronArgs& args) {
  if (two_stacks) return;
  two_stacks = true;
  if (args.pipeline > 1)
    bad_file(dir, "args.pipeline_model_parallel_size",
             detail::concat("is ", args.pipeline, "; T5 is read of one stage"),
             "Convert it with the program that trained it to one stage first.");
  ModelSettings& model = settings;
  model.family = find_spec("megatron_t5")->family;
  model.encoder_layers = args.encoder_layers;
  model.num_layers = args.encoder_layers + args.decoder_layers;
  if (model.norm != NormStyle::layernorm || model.position_embedding != PositionKind::learned ||
      !*model.tied_head || (model.num_kv_heads != 0 && model.num_kv_heads != model.num_heads))
    bad_file(dir, "args",
             "a T5 without LayerNorm, learned positions, a tied head or with groups of heads is not read",
             "Convert such a model with the program that trained it.");
}

std::vector<MegatronChunk> MegatronModel::Impl::read_rank(std::int64_t tp, std::optional<std::int64_t> pp,
                                                          const MegatronArgs& args, bool first,
                                                          SymbolicLinks links) {
  const std::optional<fs::path> path = rank_file(dir, tp, pp);
  if (!path)
    bad_file(dir, "",
             detail::concat("tensor rank ", tp, pp ? detail::concat(", stage ", *pp) : "", " of ",
                            args.tensor, " x ", args.pipeline, " is missing"),
             kWholeMegatron);
  files.push_back(std::make_unique<TorchFile>(*path, links));
  const TorchFile& file = *files.back();
  const PickleValue& root = file.root();
  const std::int64_t own = iteration_of(root), own_version = version_of(root);
  if (first) {
    take_version(file);
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
    if (!model) bad_file(*path, key, "is missing", kWholeMegatron);
    Chunk& chunk = chunks.emplace_back();
    chunk.file = &file;
    flatten(file, *model, "", 0, chunk);
  }
  return chunks;
}

/// Adds a chunk's tensors, whose layers are numbered from `first_layer` on.
void MegatronModel::Impl::take(const Chunk& chunk, std::int64_t first_layer, bool tied, Set& to,
                               std::set<std::string>& unexpected) const {
  for (const auto& [name, each] : chunk.tensors)
    take(*chunk.file, name, each, first_layer, tied, to, unexpected);
}

void MegatronModel::Impl::take(const TensorHolder& holder, const std::string& name,
                               const TorchTensor& tensor_of_it, std::int64_t first_layer, bool tied, Set& to,
                               std::set<std::string>& unexpected) const {
  const std::optional<MegatronName> known = megatron_name(name, two_stacks);
  if (!known) {
    unexpected.insert(name + " " + tensor_of_it.describe());
    return;
  }
  if (known->ignored) return;
  LayerName layer = layer_name(known->ours);
  if (layer.layer >= 0) layer.layer += first_layer;
  const std::string ours = full_name(layer);
  StoredTensor& stored = known->again               ? to.copies[ours]
                         : tied && known->tied_copy ? to.copies[kEmbedding]
                                                    : to.tensors[ours];
  stored.ranks.emplace_back(&holder, tensor_of_it);
}

void MegatronModel::Impl::note_rest(const PickleValue& root) {
  const PickleValue* optimizer = root.find("optimizer");
  if (optimizer && !optimizer->is(Kind::none)) notes.push_back("the optimizer's state is left out");
  if (root.find("opt_param_scheduler") || root.find("lr_scheduler"))
    notes.push_back("the state of the learning rate's schedule is left out");
  if (iteration > 0)
    notes.push_back(detail::concat("the count of iterations (", iteration,
                                   ") is left out: a run from these weights begins at step 0"));
}

void MegatronModel::Impl::read(const std::string& name, std::span<std::byte> out) const {
  const auto it = weights.tensors.find(name);
  TESSERA_CHECK(it != weights.tensors.end(), "there is no tensor '", name, "'");
  TESSERA_CHECK_EQ(out.size(),
                   static_cast<std::size_t>(it->second.shape.numel()) * size_of(it->second.dtype()),
                   "bytes of '", name, "'");
  read_stored(it->second, name, order(), out);
}

void MegatronModel::Impl::read_box(const std::string& name, const TensorSlice& box,
                                   std::span<std::byte> out) const {
  const StoredTensor& from = weights.tensors.at(name);
  check_slice(name, from.shape, box);
  TensorSlice rows = TensorSlice::rows(from.shape, box.offset[0], box.offset[0] + box.shape[0]);
  if (rows == box) return read_stored_rows(from, name, order(), box.offset[0], box.shape[0], out);
  const std::size_t element = size_of(from.dtype());
  std::vector<std::byte> whole(static_cast<std::size_t>(rows.shape.numel()) * element);
  read_stored_rows(from, name, order(), box.offset[0], box.shape[0], whole);
  for_each_run(rows, box, box, element, [&](std::uint64_t at, std::uint64_t to, std::uint64_t bytes) {
    std::copy_n(whole.data() + at, bytes, out.data() + to);
  });
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
    spec.dtype = impl_->weights.tensors.at(spec.name).dtype();
    specs.push_back(std::move(spec));
  }
  return specs;
}

void MegatronModel::read(const std::string& name, std::span<std::byte> out) const { impl_->read(name, out); }
bool MegatronModel::read_box(const std::string& name, const TensorSlice& box,
                             std::span<std::byte> out) const {
  impl_->read_box(name, box, out);
  return true;
}

MegatronModel open_megatron(const fs::path& dir, const MegatronReadOptions& options) {
  auto impl = std::make_unique<MegatronModel::Impl>();
  impl->dir = dir;
  impl->load(options, false);
  return MegatronModel(std::move(impl));
}

}  // namespace tessera
