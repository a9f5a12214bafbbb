#include "checkpoint/megatron_optimizer.hpp"

#include <map>

#include "checkpoint/file_io.hpp"
#include "checkpoint/megatron_buffer.hpp"
#include "checkpoint/megatron_names.hpp"

namespace tessera::checkpoint_detail {
namespace {

namespace fs = std::filesystem;
using Kind = PickleValue::Kind;

/// The optimizer's state in one rank's file.
class RankReader {
 public:
  RankReader(const RankState& rank, std::vector<std::unique_ptr<TorchFile>>& files)
      : rank_(rank),
        files_(files),
        said_(rank.file),
        state_(rank.file.root().find("optimizer")),
        args_(rank.file.root().find("args")) {}

  RankOptimizer read() {
    if (!state_ || state_->is(Kind::none))
      fail("optimizer", "there is none in this checkpoint", kWeightsAlone);
    if (!state_->is(Kind::dict)) fail("optimizer", "is a " + state_->describe(), kWeightsAlone);
    for (const auto& [key, each] : state_->entries) {
      if (key->is(Kind::integer))
        fail("optimizer", "is a chain of several (chained) optimizers, which is not read", kWeightsAlone);
    }
    out_.file = &rank_.file;
    const PickleValue* inner = state_->find("optimizer");
    const PickleValue* masters = state_->find("fp32_from_fp16_params");
    const fs::path distributed = rank_.file.path().parent_path() / "distrib_optim.pt";
    std::error_code error;
    if (fs::exists(distributed, error)) {
      said_.groups(inner ? *inner : *state_);
      read_distributed(distributed);
    } else if (masters && inner) {
      read_plain(*inner, masters);
    } else if (state_->find("state") && state_->find("param_groups")) {
      read_plain(*state_, nullptr);
    } else {
      std::string keys;
      for (const auto& [key, each] : state_->entries) keys += (keys.empty() ? "" : ", ") + key->text;
      if (inner || state_->find("param_groups"))
        fail("optimizer", "holds no state (" + keys + "), and there is no distrib_optim.pt beside the file",
             kWeightsAlone);
      fail("optimizer", "is of a kind that is not read: it holds " + keys, kWeightsAlone);
    }
    out_.said = said_.facts();
    out_.said.scaler = said_.scaler(state_->find("grad_scaler"));
    return std::move(out_);
  }

 private:
  [[noreturn]] void fail(const std::string& where, const std::string& reason,
                         const char* remedy = kWholeMegatron) const {
    said_.fail(where, reason, remedy);
  }

  TorchTensor tensor_of(const PickleValue* value, const RankParameter& parameter,
                        const std::string& where) const {
    const auto found = value ? rank_.file.tensor(*value) : std::nullopt;
    if (!found) fail(where, "is missing or no tensor");
    if (found->dtype != DType::f32 || found->shape != parameter.weight.shape)
      fail(where, "is " + found->describe() + "; " + parameter.name + " is " + parameter.weight.describe() +
                      " and needs as many float32");
    return *found;
  }

  using States = std::map<std::int64_t, const PickleValue*>;

  /// The moments by the numbers that groups give their parameters.
  States states_of(const PickleValue& inner) const {
    const PickleValue* all = inner.find("state");
    if (!all || !all->is(Kind::dict)) fail("optimizer.state", "is missing or no dict");
    States states;
    for (const auto& [key, each] : all->entries) {
      if (key->is(Kind::integer)) states[key->integer] = each;
    }
    if (states.empty()) fail("optimizer.state", "is empty: the optimizer has made no update", kWeightsAlone);
    return states;
  }

  /// Lists of main weights by group; groups without parameters are left out, as they are of groups.
  std::vector<const PickleValue*> lists_of(const PickleValue& masters) const {
    if (!masters.is(Kind::list)) fail("optimizer.fp32_from_fp16_params", "is a " + masters.describe());
    std::vector<const PickleValue*> lists;
    for (const PickleValue* list : masters.items) {
      if (!list->is(Kind::list)) fail("optimizer.fp32_from_fp16_params", "holds a " + list->describe());
      if (!list->items.empty()) lists.push_back(list);
    }
    return lists;
  }

  /// The parameters of a group, checked to be as many as `list` has.
  std::vector<std::size_t> members(const OptimizerGroup& group, const PickleValue& list,
                                   const std::string& where) const {
    std::vector<std::size_t> own;
    for (std::size_t i = 0; i < rank_.parameters.size(); ++i) {
      const RankParameter& each = rank_.parameters[i];
      if (has_weight_decay(each.name, each.weight.shape.size()) == group.decays) own.push_back(i);
    }
    if (own.size() != list.items.size())
      fail(where, detail::concat("a group has ", list.items.size(), " parameters, the model ", own.size(),
                                 group.decays ? " with" : " without", " weight decay"));
    return own;
  }

  void read_moments(std::size_t index, const PickleValue& id, const States& states) {
    const RankParameter& parameter = rank_.parameters[index];
    const auto state = id.is(Kind::integer) ? states.find(id.integer) : states.end();
    if (state == states.end()) fail("optimizer.state", "has nothing of " + parameter.name);
    const std::string where = detail::concat("optimizer.state[", id.integer, "]");
    ParameterState& to = out_.parameters[index];
    to.exp_avg = tensor_of(state->second->find("exp_avg"), parameter, where + ".exp_avg");
    to.exp_avg_sq = tensor_of(state->second->find("exp_avg_sq"), parameter, where + ".exp_avg_sq");
    said_.count(state->second->find("step"), where + ".step");
    to.main = parameter.weight;
  }

  /// `masters`: fp32_from_fp16_params by group; null where the model's own weights are fp32.
  void read_plain(const PickleValue& inner, const PickleValue* masters) {
    constexpr const char* kGroups = "optimizer.param_groups";
    constexpr const char* kMasters = "optimizer.fp32_from_fp16_params";
    const std::vector<OptimizerGroup> groups = said_.groups(inner);
    const States states = states_of(inner);
    const std::vector<const PickleValue*> lists =
        masters ? lists_of(*masters) : std::vector<const PickleValue*>{};
    if (masters && lists.size() != groups.size())
      fail(kMasters, detail::concat("has ", lists.size(), " groups, the optimizer ", groups.size()));
    out_.parameters.resize(rank_.parameters.size());
    std::size_t used = 0;
    for (std::size_t g = 0; g < groups.size(); ++g) {
      const PickleValue* params = groups[g].params;
      if (!params || !params->is(Kind::list)) fail(kGroups, "a group has no list of parameters");
      const std::vector<std::size_t> own = members(groups[g], *params, kGroups);
      for (std::size_t i = 0; i < own.size(); ++i) read_moments(own[i], *params->items[i], states);
      used += own.size();
      if (!masters) continue;
      members(groups[g], *lists[g], kMasters);
      for (std::size_t i = 0; i < own.size(); ++i) {
        const std::string where = detail::concat(kMasters, "[", g, "][", i, "]");
        out_.parameters[own[i]].main = tensor_of(lists[g]->items[i], rank_.parameters[own[i]], where);
      }
    }
    if (used != rank_.parameters.size())
      fail(kGroups, detail::concat("have ", used, " parameters, the model has ", rank_.parameters.size()));
    for (const RankParameter& each : rank_.parameters) {
      if (!masters && each.weight.dtype != DType::f32)
        fail("optimizer", "has no main weights (fp32_from_fp16_params), and " + each.name + " is " +
                              each.weight.describe());
    }
    if (!said_.facts().counted)
      fail("optimizer", "does not say how many updates it has made (step)", kWeightsAlone);
  }

  /// The buffer of a chunk: under its number, by the types of weights and gradients.
  void read_distributed(const fs::path& path) {
    if (!said_.facts().counted)
      fail("optimizer.param_groups", "do not say how many updates were made (step)", kWeightsAlone);
    files_.push_back(std::make_unique<TorchFile>(path, rank_.links));
    const TorchFile& file = *files_.back();
    const PickleValue& root = file.root();
    const auto refuse = [&](const std::string& where, const std::string& reason, const char* remedy) {
      bad_file(path, where, reason, remedy);
    };
    if (root.is(Kind::list))
      refuse("", "is a chain of several (chained) optimizers' states, which is not read", kWeightsAlone);
    const PickleValue* coalesced = root.find("buckets_coalesced");
    if (!coalesced || !coalesced->is(Kind::boolean) || coalesced->integer == 0)
      refuse("buckets_coalesced", "is not true: a distributed optimizer of before 2024 saved it",
             "Load it in a Megatron of 2024 or later, save it there, and convert that.");
    std::vector<const PickleValue*> buffers(rank_.chunks, nullptr);
    for (const auto& [key, each] : root.entries) {
      if (!key->is(Kind::integer)) continue;
      if (key->integer < 0 || key->integer >= static_cast<std::int64_t>(rank_.chunks))
        refuse(std::to_string(key->integer),
               detail::concat("is a buffer beyond those of the model's ", rank_.chunks, " chunks"),
               kWeightsAlone);
      buffers[static_cast<std::size_t>(key->integer)] = each;
    }
    out_.file = &file;
    out_.parameters.resize(rank_.parameters.size());
    for (std::size_t chunk = 0; chunk < rank_.chunks; ++chunk) {
      const std::string where = std::to_string(chunk);
      if (!buffers[chunk] || !buffers[chunk]->is(Kind::dict)) refuse(where, "is missing", kWholeMegatron);
      if (buffers[chunk]->entries.size() != 1)
        refuse(where,
               detail::concat("has parameters of ", buffers[chunk]->entries.size(), " types; one is read"),
               kWeightsAlone);
      read_buffer(file, *buffers[chunk]->entries[0].second, chunk);
    }
  }

  void read_buffer(const TorchFile& file, const PickleValue& buffer, std::size_t chunk) {
    std::vector<BufferParameter> parameters;
    std::vector<std::size_t> own;  // of rank_.parameters
    for (std::size_t i = 0; i < rank_.parameters.size(); ++i) {
      const RankParameter& each = rank_.parameters[i];
      if (each.chunk != chunk) continue;
      parameters.push_back({each.weight.numel(), each.shared});
      own.push_back(i);
    }
    const auto tensor = [&](const char* name) {
      const PickleValue* value = buffer.find(name);
      const auto found = value ? file.tensor(*value) : std::nullopt;
      if (!found || found->dtype != DType::f32 || found->shape.size() != 1 || !found->is_contiguous())
        bad_file(file.path(), detail::concat(chunk, ".", name),
                 found ? "is " + found->describe() + ", not one row of float32" : "is missing or no tensor",
                 kWholeMegatron);
      return *found;
    };
    const TorchTensor main = tensor("param"), average = tensor("exp_avg"), squares = tensor("exp_avg_sq");
    const BufferLayout layout = layout_of(parameters, chunk);
    for (const TorchTensor* each : {&main, &average, &squares}) {
      if (each->shape[0] != layout.elements)
        bad_file(
            file.path(), std::to_string(chunk),
            detail::concat("has ", each->shape[0],
                           " elements; the model's parameters in the buckets that its arguments imply make ",
                           layout.elements),
            kWeightsAlone);
    }
    for (std::size_t i = 0; i < own.size(); ++i) {
      const RankParameter& parameter = rank_.parameters[own[i]];
      const auto view = [&](const TorchTensor& of) {
        TorchTensor part = of;
        part.shape = parameter.weight.shape;
        part.strides = contiguous_strides(part.shape);
        part.offset += layout.begins[i];
        return part;
      };
      out_.parameters[own[i]] = {view(main), view(average), view(squares)};
    }
  }

  /// Gradients that are reduced while the backward pass runs are so in several buckets, but for stages and
  /// chunks after the first.
  BufferLayout layout_of(std::span<const BufferParameter> parameters, std::size_t chunk) const {
    const PickleValue* number_of = args_ ? args_->find("ddp_num_buckets") : nullptr;
    if (number_of && !number_of->is(Kind::none))
      fail("args.ddp_num_buckets", "is set: buckets of such a size are not read", kWeightsAlone);
    const PickleValue* overlap = args_ ? args_->find("overlap_grad_reduce") : nullptr;
    const bool buckets = overlap && overlap->is(Kind::boolean) && overlap->integer != 0;
    std::optional<std::int64_t> size;
    if (buckets && rank_.stage == 0 && chunk == 0) {
      const double given = OptimizerValues::number(args_->find("ddp_bucket_size"), 0);
      size = given >= 1 ? static_cast<std::int64_t>(std::min(given, 1e15))
                        : std::max<std::int64_t>(40'000'000,
                                                 1'000'000 * std::min<std::int64_t>(rank_.data, 1 << 24));
    }
    return buffer_layout(parameters, size);
  }

  const RankState& rank_;
  std::vector<std::unique_ptr<TorchFile>>& files_;
  OptimizerValues said_;
  const PickleValue *state_, *args_;
  RankOptimizer out_;
};

}  // namespace

RankOptimizer read_rank_optimizer(const RankState& rank, std::vector<std::unique_ptr<TorchFile>>& files) {
  return RankReader(rank, files).read();
}

}  // namespace tessera::checkpoint_detail
