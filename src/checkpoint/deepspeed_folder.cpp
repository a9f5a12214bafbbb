#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "checkpoint/torch_folders.hpp"

namespace tessera::checkpoint_detail {
namespace {

namespace fs = std::filesystem;
using Kind = PickleValue::Kind;
using FilePtr = std::shared_ptr<const TorchFile>;

constexpr const char* kDeepSpeedRemedy =
    "Check that the checkpoint is whole and was written by DeepSpeed's save_checkpoint.";

[[noreturn]] void damaged(const fs::path& path, const std::string& where, const std::string& reason) {
  bad_file(path, where, reason, kDeepSpeedRemedy);
}

struct FlatTensor {
  FilePtr file;
  TorchTensor tensor;
};

/// Several flat tensors as one.
class Row {
 public:
  void append(FlatTensor part) {
    elements_ += part.tensor.numel();
    parts_.push_back(std::move(part));
  }
  void append(const Row& row) {
    for (const FlatTensor& part : row.parts_) append(part);
  }
  std::int64_t elements() const { return elements_; }
  DType dtype() const { return parts_.front().tensor.dtype; }

  /// Elements [at, at + count) of the row as elements [first, ...) of a tensor.
  void give(PartedTensor& to, std::int64_t first, std::int64_t at, std::int64_t count) const {
    std::int64_t begin = 0;
    for (const FlatTensor& part : parts_) {
      const std::int64_t end = begin + part.tensor.numel(), from = std::max(at, begin),
                         until = std::min(at + count, end);
      if (from < until)
        to.parts.push_back({.box = TensorSlice::whole(to.shape),
                            .first = first + from - at,
                            .count = until - from,
                            .read = elements_of(part.file, part.tensor, from - begin)});
      begin = end;
    }
  }

 private:
  std::vector<FlatTensor> parts_;
  std::int64_t elements_ = 0;
};

/// The 3 of "zero_pp_rank_3_mp_rank_00_model_states.pt" after "zero_pp_rank_".
std::optional<std::int64_t> number_after(const std::string& name, const std::string& word) {
  const std::size_t at = name.find(word);
  if (at == std::string::npos) return std::nullopt;
  std::int64_t value = 0;
  std::size_t end = at + word.size();
  for (; end < name.size() && name[end] >= '0' && name[end] <= '9' && value < 1'000'000; ++end)
    value = 10 * value + (name[end] - '0');
  return end == at + word.size() ? std::nullopt : std::optional(value);
}

class DeepSpeedFolder {
 public:
  DeepSpeedFolder(const fs::path& dir, SymbolicLinks links, TorchFacts& facts, RunValue value)
      : dir_(tag_folder(dir, links)), links_(links), found_(facts), value_(value) {
    for (const auto& entry : fs::directory_iterator(dir_)) {
      const std::string name = entry.path().filename();
      const bool model = name.ends_with("model_states.pt");
      if (!model && !name.ends_with("optim_states.pt")) continue;
      if (const auto rank = number_after(name, "mp_rank_"); !rank || *rank != 0 || name.starts_with("layer_"))
        damaged(
            dir_ / name, "",
            "is of a model that is cut over tensor or pipeline ranks, which is not read. Make one of it with "
            "DeepSpeed's ds_to_universal.py");
      const std::int64_t data = number_after(name, "zero_pp_rank_").value_or(0);
      if (!(model ? models_ : optimizers_).emplace(data, entry.path()).second)
        damaged(dir_ / name, "", detail::concat("is the second file of rank ", data));
    }
  }

  std::vector<PartedTensor> tensors() {
    read();
    return std::move(tensors_);
  }

 private:
  void read() {
    if (fs::is_directory(dir_ / "zero")) return read_universal();
    if (models_.empty()) damaged(dir_, "", "holds no file *model_states.pt");
    const std::int64_t stage = optimizers_.empty() ? 0 : read_optimizers();
    for (const auto& [rank, path] : models_) {
      if (rank != static_cast<std::int64_t>(states_.size()))
        damaged(dir_, "", detail::concat("the model's file of rank ", states_.size(), " is missing"));
      states_.push_back(std::make_shared<const TorchFile>(path, links_));
    }
    if (stage >= 3 && states_.size() != rows_.size())
      damaged(dir_, "",
              detail::concat("there are ", states_.size(), " files of models and ", rows_.size(),
                             " of optimizers"));
    found_.steps = counted("global_steps");
    found_.samples = counted("global_samples");
    if (stage == 0 && value_ != RunValue::weight) damaged(dir_, "", "holds no optimizer's state of ZeRO");
    if (stage == 0) {
      found_.notes.push_back("weights are as the module has them: no file holds an optimizer's of ZeRO");
      add_module(false);
    } else if (stage >= 3) {
      add_stage3();
    } else {
      add_stage2();
    }
    share();
  }

  std::int64_t counted(const char* name) const {
    const PickleValue* count = states_[0]->root().find(name);
    return count && count->is(Kind::integer) && count->integer >= 0 ? count->integer : -1;
  }

  static fs::path tag_folder(const fs::path& dir, SymbolicLinks links) {
    const fs::path latest = dir / "latest";
    if (!fs::exists(latest)) return dir;
    std::string tag = read_text(latest, 4096, links);
    while (!tag.empty() && (tag.back() == '\n' || tag.back() == ' ')) tag.pop_back();
    if (!is_plain_file_name(tag)) damaged(latest, "", "names '" + tag + "', which is no folder beside it");
    if (!fs::is_directory(dir / tag)) damaged(latest, "", "names '" + tag + "', which is not there");
    return dir / tag;
  }

  const PickleValue& member(const TorchFile& file, const PickleValue& value, const char* name,
                            Kind kind) const {
    const PickleValue* found = value.find(name);
    if (!found || !found->is(kind))
      damaged(file.path(), detail::concat("'", name, "'"),
              found ? "is a " + found->describe() : std::string("is missing"));
    return *found;
  }
  TorchTensor tensor_in(const TorchFile& file, const PickleValue& value, const std::string& name) const {
    const std::optional<TorchTensor> tensor = file.tensor(value);
    if (!tensor)
      damaged(file.path(), "'" + name + "'", "is a " + value.describe() + " where a tensor should be");
    return *tensor;
  }
  Shape extents_in(const TorchFile& file, const PickleValue& value, const std::string& name) const {
    const auto dims = extents(value);
    if (!dims) damaged(file.path(), "'" + name + "'", "has no proper shape");
    return shape_of(*dims, file.path(), name);
  }

  /// The partitions of all ranks: one row of each group and rank. Returns the stage.
  std::int64_t read_optimizers() {
    std::int64_t stage = -1;
    for (const auto& [rank, path] : optimizers_) {
      if (rank != static_cast<std::int64_t>(rows_.size()))
        damaged(dir_, "", detail::concat("the optimizer's file of rank ", rows_.size(), " is missing"));
      const auto file = std::make_shared<const TorchFile>(path, links_);
      const PickleValue& state = member(*file, file->root(), "optimizer_state_dict", Kind::dict);
      const PickleValue* said = state.find("zero_stage");
      if (said && said->is(Kind::object) && said->items.size() == 1)
        said = said->items[0];  // an enumeration's value
      if (!said || !said->is(Kind::integer) || said->integer < 1 || said->integer > 3)
        damaged(path, "'zero_stage'", "is not 1, 2 or 3");
      if (stage >= 0 && stage != said->integer)
        damaged(path, "'zero_stage'", "is another one than that of the ranks before");
      stage = said->integer;
      read_groups(file, state, stage);
      check_ranks(*file, state);
    }
    return stage;
  }

  /// What the optimizer itself keeps of each group.
  std::vector<const PickleValue*> optimizer_groups(const FilePtr& file, const PickleValue& state,
                                                   std::int64_t stage) const {
    const char* name = stage >= 3 ? "optimizer_state_dict" : "base_optimizer_state";
    const PickleValue* base = state.find(name);
    if (base && base->is(Kind::list)) return base->items;  // of versions before 0.5
    if (!base || !base->is(Kind::dict)) damaged(file->path(), detail::concat("'", name, "'"), "is missing");
    std::vector<const PickleValue*> groups;
    for (const auto& [key, group] : member(*file, *base, "state", Kind::dict).entries) {
      if (!key->is(Kind::integer) || key->integer != static_cast<std::int64_t>(groups.size()))
        damaged(file->path(), "the optimizer's state", "has groups that are not numbered in their order");
      groups.push_back(group);
    }
    return groups;
  }

  /// All parameters have had as many updates.
  void count(const FilePtr& file, const PickleValue* step) {
    std::int64_t updates = -1;
    if (step && step->is(Kind::integer)) {
      updates = step->integer;
    } else if (const auto tensor = step ? file->tensor(*step) : std::nullopt;
               tensor && tensor->numel() == 1 && tensor->dtype == DType::f32) {
      float value = 0;
      file->read(*tensor, std::as_writable_bytes(std::span(&value, 1)));
      updates = std::llround(value);
    }
    if (updates < 0 || (found_.updates >= 0 && found_.updates != updates))
      damaged(file->path(), "the optimizer's 'step'",
              "is missing, or another one than that of other parameters");
    found_.updates = updates;
  }

  void read_groups(const FilePtr& file, const PickleValue& state, std::int64_t stage) {
    const char* name = stage >= 3 ? "fp32_flat_groups" : "single_partition_of_fp32_groups";
    std::vector<Row>& groups = rows_.emplace_back();
    std::vector<const PickleValue*> stored = member(*file, state, name, Kind::list).items;
    if (value_ != RunValue::weight) {
      name = torch_name(value_);
      stored = optimizer_groups(file, state, stage);
      for (const PickleValue*& group : stored) {
        count(file, group->find("step"));
        const PickleValue* found = group->find(name);
        if (!found)
          damaged(file->path(), detail::concat("'", name, "'"), "is missing: the optimizer was not Adam");
        group = found;
      }
    }
    for (const PickleValue* group : stored) {
      Row row;
      if (group->is(Kind::list)) {
        for (const PickleValue* part : group->items) row.append({file, tensor_in(*file, *part, name)});
      } else {
        row.append({file, tensor_in(*file, *group, name)});
      }
      groups.push_back(std::move(row));
    }
    if (groups.size() != rows_.front().size())
      damaged(file->path(), name, "has another number of groups than those of other ranks");
    if (const PickleValue* padding = state.find("param_alignment_paddings");
        padding && paddings_.empty() && stage < 3) {
      for (const PickleValue* group : padding->items) {
        const auto list = extents(*group);
        if (!list) damaged(file->path(), "'param_alignment_paddings'", "holds something else than numbers");
        paddings_.push_back(*list);
      }
    }
  }

  /// As many ranks as the optimizer was cut for.
  void check_ranks(const TorchFile& file, const PickleValue& state) const {
    const PickleValue* count = state.find("partition_count");
    if (count && count->is(Kind::list) && !count->items.empty()) count = count->items[0];
    if (count && count->is(Kind::integer) && count->integer != static_cast<std::int64_t>(optimizers_.size()))
      damaged(file.path(), "'partition_count'",
              detail::concat("is ", count->integer, ", but there are optimizer files of ", optimizers_.size(),
                             " ranks"));
  }

  PartedTensor& begin_tensor(std::string name, const Shape& shape, DType dtype) {
    return tensors_.emplace_back(PartedTensor{std::move(name), dtype, shape, {}});
  }

  /// A stage below 3: groups of parameters in a row, cut into as many equal parts as there are ranks.
  void add_stage2() {
    const TorchFile& model = *states_[0];
    const PickleValue& shapes = member(model, model.root(), "param_shapes", Kind::list);
    if (shapes.items.size() != rows_[0].size())
      damaged(model.path(), "'param_shapes'",
              detail::concat("has ", shapes.items.size(), " groups, the optimizer has ", rows_[0].size()));
    for (std::size_t g = 0; g < shapes.items.size(); ++g) {
      const auto& names = shapes.items[g]->entries;
      if (!paddings_.empty() && (paddings_.size() != rows_[0].size() || paddings_[g].size() != names.size()))
        damaged(model.path(), "'param_alignment_paddings'", "does not fit the parameters");
      std::int64_t at = 0, available = 0;
      for (const std::vector<Row>& rank : rows_) available += rank[g].elements();
      for (std::size_t p = 0; p < names.size(); ++p) {
        const Shape shape = extents_in(model, *names[p].second, names[p].first->text);
        PartedTensor& tensor = begin_tensor(names[p].first->text, shape, rows_[0][g].dtype());
        std::int64_t begin = 0;  // of the rank's partition in the group
        for (const std::vector<Row>& rank : rows_) {
          const std::int64_t from = std::max(at, begin),
                             until = std::min(at + shape.numel(), begin + rank[g].elements());
          if (from < until) rank[g].give(tensor, from - at, from - begin, until - from);
          begin += rank[g].elements();
        }
        at += shape.numel() + (paddings_.empty() ? 0 : paddings_[g][p]);
      }
      // A group is padded to a multiple of twice the ranks.
      const auto step = 2 * static_cast<std::int64_t>(rows_.size());
      const bool fits = value_ == RunValue::weight ? (at + step - 1) / step == (available + step - 1) / step
                                                   : at <= available;
      if (!fits)
        damaged(dir_, "", detail::concat("group ", g, " has ", available, " elements, its parameters ", at));
    }
    if (value_ == RunValue::weight) add_module(true);
  }

  /// Stage 3: each parameter in equal parts, one of each rank, at the same place of its groups.
  void add_stage3() {
    const TorchFile& model = *states_[0];
    std::vector<Row> ranks;
    for (std::size_t r = 0; r < rows_.size(); ++r) {
      Row whole;
      for (const Row& group : rows_[r]) whole.append(group);
      ranks.push_back(std::move(whole));
    }
    const auto world = static_cast<std::int64_t>(ranks.size());
    std::int64_t at = 0;
    for (const PickleValue* group : member(model, model.root(), "param_shapes", Kind::list).items) {
      for (const auto& [name, value] : group->entries) {
        const Shape shape = extents_in(model, *value, name->text);
        const std::int64_t share = (shape.numel() + world - 1) / world;
        PartedTensor& tensor = begin_tensor(name->text, shape, ranks[0].dtype());
        for (std::int64_t r = 0; r < world; ++r)
          ranks[static_cast<std::size_t>(r)].give(
              tensor, r * share, at, std::clamp<std::int64_t>(shape.numel() - r * share, 0, share));
        at += share;
      }
    }
    for (const Row& rank : ranks) {
      if (rank.elements() != at)
        damaged(dir_, "", detail::concat("a rank has ", rank.elements(), " elements, its parameters ", at));
    }
    if (value_ == RunValue::weight) add_frozen3(world);
  }

  /// What is not trained, in parts as well.
  void add_frozen3(std::int64_t world) {
    const PickleValue* frozen = states_[0]->root().find("frozen_param_shapes");
    if (!frozen || !frozen->is(Kind::dict)) return;
    for (const auto& [name, value] : frozen->entries) {
      const Shape shape = extents_in(*states_[0], *value, name->text);
      const std::int64_t share = (shape.numel() + world - 1) / world;
      PartedTensor& tensor = begin_tensor(name->text, shape, DType::f32);
      for (std::int64_t r = 0; r < world; ++r) {
        const FilePtr& file = states_[static_cast<std::size_t>(r)];
        const PickleValue* part =
            member(*file, file->root(), "frozen_param_fragments", Kind::dict).find(name->text);
        if (!part) damaged(file->path(), "'" + name->text + "'", "has no part here");
        Row row;
        row.append({file, tensor_in(*file, *part, name->text)});
        tensor.dtype = row.dtype();
        row.give(tensor, r * share, 0, std::clamp<std::int64_t>(shape.numel() - r * share, 0, share));
      }
    }
  }

  /// What the module's state_dict holds: all of it, or what no optimizer has (buffers, frozen parameters).
  void add_module(bool rest) {
    const FilePtr& file = states_[0];
    const PickleValue* shared = file->root().find("shared_params");
    for (const auto& [name, value] : member(*file, file->root(), "module", Kind::dict).entries) {
      if (!name->is(Kind::text)) damaged(file->path(), "'module'", "has a name that is no text");
      const std::optional<TorchTensor> tensor = file->tensor(*value);
      if (!tensor || (rest && (find(name->text) || (shared && shared->find(name->text))))) continue;
      tensors_.push_back(whole_tensor(name->text, file, *tensor));
    }
  }

  const PartedTensor* find(std::string_view name) const {
    const auto it =
        std::find_if(tensors_.begin(), tensors_.end(), [&](const PartedTensor& t) { return t.name == name; });
    return it == tensors_.end() ? nullptr : &*it;
  }

  /// Second names of parameters, such as a tied head.
  void share() {
    const PickleValue* shared = states_[0]->root().find("shared_params");
    if (!shared || !shared->is(Kind::dict)) return;
    for (const auto& [name, source] : shared->entries) {
      const PartedTensor* tensor = find(source->text);
      if (!tensor || find(name->text)) continue;
      PartedTensor copy = *tensor;
      copy.name = name->text;
      tensors_.push_back(std::move(copy));
    }
  }

  /// The form of ds_to_universal.py: a folder for each parameter.
  void read_universal() {
    if (!models_.empty())
      states_.push_back(std::make_shared<const TorchFile>(models_.begin()->second, links_));
    const PickleValue* shared = states_.empty() ? nullptr : states_[0]->root().find("shared_params");
    for (const auto& entry : fs::directory_iterator(dir_ / "zero")) {
      if (!entry.is_directory()) continue;
      const fs::path path =
          entry.path() / (value_ == RunValue::weight ? "fp32.pt" : std::string(torch_name(value_)) + ".pt");
      const std::string name = entry.path().filename();
      // The moments of a tied weight lie under its first name alone.
      if (value_ != RunValue::weight && shared && shared->find(name) && !fs::exists(path)) continue;
      const auto file = std::make_shared<const TorchFile>(path, links_);
      const PickleValue* value = file->root().find("param");
      const TorchTensor tensor = tensor_in(*file, value ? *value : file->root(), name);
      tensors_.push_back(whole_tensor(name, file, tensor));
      if (const fs::path step = entry.path() / "step.pt"; value_ != RunValue::weight && fs::exists(step)) {
        const auto stored = std::make_shared<const TorchFile>(step, links_);
        const PickleValue* value = stored->root().find("param");
        count(stored, value ? value : &stored->root());
      }
    }
    if (!states_.empty()) {
      found_.steps = counted("global_steps");
      found_.samples = counted("global_samples");
      if (found_.updates < 0 && found_.steps >= 0)
        found_.updates = found_.steps - std::max<std::int64_t>(0, counted("skipped_steps"));
      share();
    }
    std::sort(tensors_.begin(), tensors_.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  }

  fs::path dir_;
  SymbolicLinks links_;
  TorchFacts& found_;
  RunValue value_;
  std::map<std::int64_t, fs::path> models_, optimizers_;  // by data rank
  std::vector<FilePtr> states_;
  std::vector<std::vector<Row>> rows_;               // by data rank and group
  std::vector<std::vector<std::int64_t>> paddings_;  // behind each parameter of each group
  std::vector<PartedTensor> tensors_;
};

}  // namespace

std::vector<PartedTensor> deepspeed_tensors(const fs::path& dir, SymbolicLinks links, TorchFacts& facts,
                                            RunValue value) {
  return DeepSpeedFolder(dir, links, facts, value).tensors();
}

}  // namespace tessera::checkpoint_detail
