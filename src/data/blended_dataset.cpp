#include <algorithm>

#include "tessera/data/dataset.hpp"

namespace tessera {

void check_view(const SampleView& view, std::int64_t seq_length, const SampleFields& fields) {
  const auto s = static_cast<std::size_t>(seq_length);
  TESSERA_CHECK(view.tokens.size() == s && view.labels.size() == s, "a sample has ", s, " tokens and labels");
  TESSERA_CHECK(view.position_ids.size() == (fields.position_ids ? s : 0), "position_ids of a sample");
  TESSERA_CHECK(view.document_ids.size() == (fields.document_ids ? s : 0), "document_ids of a sample");
  TESSERA_CHECK(view.token_types.size() == (fields.token_types ? s : 0), "token_types of a sample");
  TESSERA_CHECK(view.key_end.size() == (fields.key_end ? 1U : 0U), "key_end of a sample");
  TESSERA_CHECK(view.sample_label.size() == (fields.sample_label ? 1U : 0U), "the label of a sample");
  const auto encoder = static_cast<std::size_t>(fields.encoder_length);
  TESSERA_CHECK(view.encoder_tokens.size() == encoder, "encoder_tokens of a sample");
  TESSERA_CHECK(view.encoder_key_end.size() == (encoder > 0 ? 1U : 0U), "encoder_key_end of a sample");
}

BlendedDataset::BlendedDataset(std::vector<std::shared_ptr<const Dataset>> members,
                               std::span<const double> weights, std::optional<std::int64_t> size)
    : members_(std::move(members)) {
  TESSERA_CHECK(!members_.empty(), "a blend of no datasets");
  const Dataset& first = *members_.front();
  std::vector<std::int64_t> sizes;
  for (const auto& member : members_) {
    TESSERA_CHECK(member->seq_length() == first.seq_length() && member->fields() == first.fields(),
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
Shared build_member(const std::shared_ptr<const IndexedDataset>& data, ElementRange units,
                    const SampleMaker& maker, Split split, std::optional<std::int64_t> num_samples,
                    std::vector<std::string>& warnings) {
  const ElementRange range = maker.sequences(*data, units);
  const bool empty = count_tokens(data->lengths(), range.begin, range.end) == 0;
  if (empty && num_samples.value_or(0) == 0) return nullptr;
  TESSERA_ENSURE(DataError, !empty, data->prefix(), ": the ", name_of(split), " split has ", maker.unit(),
                 " [", units.begin, ", ", units.end, ") of ", maker.units(*data), ", no token, but ",
                 *num_samples,
                 " samples are asked for. Give it a larger share in data.split, or use more data");
  SampleMaker::Made made = maker.make(data, units, split, num_samples);
  if (!made.note.empty()) warnings.push_back(std::move(made.note));
  return made.samples;
}

Shared build_split(const SplitsOptions& options, const SampleMaker& maker, const Files& files,
                   const SplitBounds& bounds, Split split, std::vector<std::string>& warnings) {
  const auto which = static_cast<std::size_t>(split);
  if (!bounds[which]) return nullptr;
  const auto asked = options.num_samples[which];
  const auto range_of = [&](const auto& data) { return *split_ranges(bounds, maker.units(*data))[which]; };
  const bool weighted = options.members.front().weight.has_value();
  if (files.size() == 1 && !weighted)
    return build_member(files[0], range_of(files[0]), maker, split, asked, warnings);
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
    Shared member = build_member(files[i], range_of(files[i]), maker, split, request, warnings);
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

Files open_files(const SplitsOptions& options) {
  TESSERA_ENSURE(ConfigError, !options.members.empty(), "data.path names no dataset");
  Files files;
  for (const BlendMember& member : options.members) {
    TESSERA_ENSURE(ConfigError, member.weight.has_value() == options.members.front().weight.has_value(),
                   "blend: give every path a weight or none (", member.prefix, ")");
    files.push_back(std::make_shared<IndexedDataset>(member.prefix, options.files));
    if (options.files.on_progress) options.files.on_progress();
  }
  return files;
}

/// Each split of data of its own.
DatasetSplits build_apart(const SplitsOptions& options, const SampleMaker& maker) {
  static constexpr std::array kWhole = {"1,0,0", "0,1,0", "0,0,1"};
  DatasetSplits data;
  const std::array places = {&data.train, &data.valid, &data.test};
  for (const Split split : {Split::train, Split::valid, Split::test}) {
    const auto which = static_cast<std::size_t>(split);
    if (options.split_members[which].empty()) continue;
    SplitsOptions one = options;
    one.members = options.split_members[which];
    *places[which] =
        build_split(one, maker, open_files(one), parse_split(kWhole[which]), split, data.warnings);
  }
  return data;
}

}  // namespace

DatasetSplits build_splits(const SplitsOptions& options, const SampleMaker& maker) {
  const bool apart = std::ranges::any_of(options.split_members, [](const auto& m) { return !m.empty(); });
  if (apart) return build_apart(options, maker);
  const Files files = open_files(options);
  const SplitBounds bounds = parse_split(options.split);
  DatasetSplits data;
  data.train = build_split(options, maker, files, bounds, Split::train, data.warnings);
  data.valid = build_split(options, maker, files, bounds, Split::valid, data.warnings);
  data.test = build_split(options, maker, files, bounds, Split::test, data.warnings);
  return data;
}

}  // namespace tessera
