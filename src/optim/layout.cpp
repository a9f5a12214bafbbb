#include "tessera/optim/layout.hpp"

#include <algorithm>
#include <string_view>
#include <unordered_set>

namespace tessera {
namespace {

std::int64_t round_up(std::int64_t n, std::int64_t step) { return (n + step - 1) / step * step; }

void check_parameters(std::span<Parameter* const> parameters) {
  std::unordered_set<std::string_view> names;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const Parameter* p = parameters[i];
    TESSERA_CHECK(p != nullptr, "parameter ", i, " of a ParamStore is null");
    TESSERA_CHECK(names.insert(p->name()).second, "two parameters are named ", p->name(),
                  ": names key initial values and checkpoints; a shared weight is registered once");
    TESSERA_CHECK(p->shape().numel() > 0, "parameter ", p->name(), " has no elements: shape ", p->shape());
  }
}

void check_options(std::span<Parameter* const> parameters, const LayoutOptions& options) {
  TESSERA_CHECK(options.data_ranks >= 1 && options.bucket_elements >= 0, "a layout for ", options.data_ranks,
                " data ranks with buckets of ", options.bucket_elements, " elements");
  if (!options.units.empty()) TESSERA_CHECK_EQ(options.units.size(), parameters.size(), "units of a layout");
  if (options.capacities.empty()) return;
  TESSERA_CHECK_EQ(options.capacities.size(), parameters.size(), "capacities of a layout");
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    TESSERA_CHECK(options.capacities[i] >= parameters[i]->shape().numel(), options.capacities[i],
                  " elements set aside for parameter ", parameters[i]->name(), " of shape ",
                  parameters[i]->shape());
  }
}

/// A bucket before it has its place.
struct Draft {
  std::vector<std::size_t> members;  // places in registration order
  std::int64_t elements = 0;
  bool reads_main = false, tied = false, experts = false;
};

class Drafts {
 public:
  explicit Drafts(std::int64_t limit) : limit_(limit) {}

  void add(std::size_t place, std::int64_t elements, const ParameterTraits& traits, int unit) {
    if (unit != std::exchange(unit_, unit)) close();
    if (traits.tied) {
      closed_.push_back({{place}, elements, traits.reads_main, true, traits.expert});
      return;
    }
    Draft& draft = open_[traits.reads_main ? 1 : 0][traits.expert ? 1 : 0];
    draft.reads_main = traits.reads_main;
    draft.experts = traits.expert;
    draft.members.push_back(place);
    draft.elements += elements;
    if (draft.elements >= limit_) closed_.push_back(std::exchange(draft, {}));
  }

  /// All of them, in the order of their last members: backward runs from the last place to the first.
  std::vector<Draft> take() {
    close();
    std::sort(closed_.begin(), closed_.end(),
              [](const Draft& a, const Draft& b) { return a.members.back() > b.members.back(); });
    return std::move(closed_);
  }

 private:
  void close() {
    for (auto& row : open_) {
      for (Draft& draft : row) {
        if (!draft.members.empty()) closed_.push_back(std::exchange(draft, {}));
      }
    }
  }

  std::int64_t limit_;
  int unit_ = -1;
  Draft open_[2][2];
  std::vector<Draft> closed_;
};

}  // namespace

FlatLayout::FlatLayout(std::span<Parameter* const> parameters, const LayoutOptions& options) {
  check_parameters(parameters);
  check_options(parameters, options);
  const auto capacity = [&](std::size_t place) {
    const std::int64_t least =
        options.capacities.empty() ? parameters[place]->shape().numel() : options.capacities[place];
    return round_up(least, kAlignment);
  };
  const std::int64_t megatron =
      std::max<std::int64_t>(40'000'000, std::int64_t{1'000'000} * options.data_ranks);
  Drafts drafts(options.bucket_elements > 0 ? options.bucket_elements : megatron);
  for (std::size_t place = parameters.size(); place-- > 0;) {
    drafts.add(place, capacity(place), parameters[place]->traits(),
               options.units.empty() ? -1 : options.units[place]);
  }
  slots_.reserve(parameters.size());
  for (const Draft& draft : drafts.take()) {
    const std::int64_t begin = numel_;
    const std::size_t first = slots_.size();
    for (const std::size_t place : draft.members) {
      Parameter* parameter = parameters[place];
      index_.emplace(parameter, slots_.size());
      slots_.push_back({parameter, numel_, parameter->shape().numel(), buckets_.size()});
      numel_ += capacity(place);
    }
    numel_ = begin + round_up(numel_ - begin, kAlignment * options.data_ranks);
    buckets_.push_back(
        {begin, numel_ - begin, first, draft.members.size(), draft.reads_main, draft.tied, draft.experts});
  }
}

std::size_t FlatLayout::index_of(const Parameter& parameter) const {
  const auto it = index_.find(&parameter);
  TESSERA_CHECK(it != index_.end(), "parameter ", parameter.name(), " is not in this ParamStore");
  return it->second;
}

}  // namespace tessera
