#include <algorithm>

#include "tessera/data/dataset.hpp"

namespace tessera {

BlendedDataset::BlendedDataset(std::vector<std::shared_ptr<const Dataset>> members,
                               std::span<const double> weights, std::optional<std::int64_t> size)
    : members_(std::move(members)) {
  TESSERA_CHECK(!members_.empty(), "a blend of no datasets");
  const Dataset& first = *members_.front();
  std::vector<std::int64_t> sizes;
  for (const auto& member : members_) {
    TESSERA_CHECK(member->seq_length() == first.seq_length() &&
                      member->has_position_ids() == first.has_position_ids() &&
                      member->has_document_ids() == first.has_document_ids(),
                  "the datasets of a blend differ in sequence length or options");
    sizes.push_back(member->size());
  }
  if (!size) {
    indices_ = exhaustive_blend_indices(sizes);
    return;
  }
  TESSERA_CHECK(weights.size() == members_.size(), weights.size(), " weights for ", members_.size(),
                " datasets");
  indices_ = blend_indices(normalized(weights), *size);
  std::vector<std::int64_t> used(members_.size(), 0);
  for (const std::int16_t d : indices_.dataset) ++used[static_cast<std::size_t>(d)];
  for (std::size_t d = 0; d < members_.size(); ++d) {
    TESSERA_CHECK(used[d] <= sizes[d], "blend: dataset ", d, " has ", sizes[d], " samples, but ", used[d],
                  " are to be drawn from it");
  }
}

void BlendedDataset::fetch(std::int64_t index, const SampleView& out) const {
  TESSERA_CHECK(index >= 0 && index < size(), "sample ", index, " of a blend of ", size());
  const auto at = static_cast<std::size_t>(index);
  members_[static_cast<std::size_t>(indices_.dataset[at])]->fetch(indices_.sample[at], out);
}

namespace {

using Shared = std::shared_ptr<const Dataset>;
using Files = std::vector<std::shared_ptr<const IndexedDataset>>;

/// One member's part of one split; null when it is empty and nothing was asked of it.
Shared build_member(const std::shared_ptr<const IndexedDataset>& data, ElementRange range,
                    GptDatasetOptions options, Split split, std::optional<std::int64_t> num_samples,
                    std::vector<std::string>& warnings) {
  const bool empty = count_tokens(data->lengths(), range.begin, range.end) == 0;
  if (empty && num_samples.value_or(0) == 0) return nullptr;
  TESSERA_ENSURE(DataError, !empty, data->prefix(), ": the ", name_of(split), " split has sequences [",
                 range.begin, ", ", range.end, ") of ", data->sequences(), ", no token, but ", *num_samples,
                 " samples are asked for. Give it a larger share in data.split, or use more data");
  options.split = split;
  options.num_samples = num_samples;
  auto made = std::make_shared<const GptDataset>(data, range, options);
  if (!made->cache_note().empty()) warnings.push_back(made->cache_note());
  return made;
}

Shared build_split(const GptDataOptions& options, const Files& files, const SplitBounds& bounds, Split split,
                   std::vector<std::string>& warnings) {
  const auto which = static_cast<std::size_t>(split);
  if (!bounds[which]) return nullptr;
  const auto asked = options.num_samples[which];
  const auto range_of = [&](const auto& data) { return *split_ranges(bounds, data->sequences())[which]; };
  const bool weighted = options.members.front().weight.has_value();
  if (files.size() == 1 && !weighted) {
    return build_member(files[0], range_of(files[0]), options.dataset, split, asked, warnings);
  }
  TESSERA_ENSURE(ConfigError, !weighted || asked, "a weighted blend needs a number of ", name_of(split),
                 " samples");
  std::vector<double> weights;
  for (const BlendMember& member : options.members) weights.push_back(member.weight.value_or(0));
  if (weighted) weights = normalized(weights);
  std::vector<Shared> members;
  std::vector<double> kept;
  std::int64_t size = 0;
  for (std::size_t i = 0; i < files.size(); ++i) {
    if (weighted && weights[i] == 0) continue;  // the greedy draw would pick it on a tie
    const auto request = weighted ? std::optional(blend_request(*asked, weights[i])) : std::nullopt;
    Shared member = build_member(files[i], range_of(files[i]), options.dataset, split, request, warnings);
    if (member == nullptr) continue;
    kept.push_back(weighted ? weights[i] : static_cast<double>(member->size()));
    size += weighted ? blend_target(*asked, weights[i]) : member->size();
    members.push_back(std::move(member));
  }
  if (members.empty()) return nullptr;
  if (weighted) return std::make_shared<BlendedDataset>(std::move(members), kept, size);
  if (!asked) return std::make_shared<BlendedDataset>(std::move(members), kept, std::nullopt);
  return std::make_shared<BlendedDataset>(std::move(members), kept, std::min(*asked, size));
}

}  // namespace

GptData build_gpt_data(const GptDataOptions& options) {
  TESSERA_ENSURE(ConfigError, !options.members.empty(), "data.path names no dataset");
  Files files;
  for (const BlendMember& member : options.members) {
    TESSERA_ENSURE(ConfigError, member.weight.has_value() == options.members.front().weight.has_value(),
                   "blend: give every path a weight or none (", member.prefix, ")");
    files.push_back(std::make_shared<IndexedDataset>(member.prefix, options.files));
    if (options.dataset.on_progress) options.dataset.on_progress();
  }
  const SplitBounds bounds = parse_split(options.split);
  GptData data;
  data.train = build_split(options, files, bounds, Split::train, data.warnings);
  data.valid = build_split(options, files, bounds, Split::valid, data.warnings);
  data.test = build_split(options, files, bounds, Split::test, data.warnings);
  return data;
}

}  // namespace tessera
