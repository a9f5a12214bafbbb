#include "tessera/data/dataset.hpp"

#include <random>

#include "data/file.hpp"
#include "raw_files.hpp"
#include "tessera/base/hash.hpp"
#include "tessera/data/batch.hpp"
#include "tessera/data/indexed_writer.hpp"

namespace tessera {
namespace {

using namespace testing;

using Ids = std::vector<std::int32_t>;

struct Sample {
  Ids tokens, labels, position_ids, document_ids;
};

Sample fetch(const Dataset& data, std::int64_t index) {
  const auto s = static_cast<std::size_t>(data.seq_length());
  Sample out{Ids(s, -7), Ids(s, -7), Ids(data.has_position_ids() ? s : 0),
             Ids(data.has_document_ids() ? s : 0)};
  data.fetch(index, {out.tokens, out.labels, out.position_ids, out.document_ids});
  return out;
}

GptDatasetOptions plain(std::int64_t s, std::optional<std::int64_t> samples = {}) {
  GptDatasetOptions options;
  options.seq_length = s;
  options.num_samples = samples;
  options.use_cache = false;
  return options;
}

TEST(GptDataset, SamplesAreSlicesOfTheJoinedStream) {
  const ScratchFolder folder;
  std::mt19937 random(5);
  for (int round = 0; round < 40; ++round) {
    std::vector<std::int32_t> lengths(1 + random() % 30);
    for (auto& length : lengths) length = static_cast<std::int32_t>(random() % 12);
    lengths.back() = 9;
    write_counting(folder / "d", lengths);
    auto data = std::make_shared<IndexedDataset>(folder / "d");
    const std::int64_t s = 1 + static_cast<std::int64_t>(random() % 8);
    const std::int64_t begin = round % 3 == 0 ? static_cast<std::int64_t>(lengths.size()) - 1 : 0;
    const GptDataset samples(data, {begin, data->sequences()}, plain(s, random() % 50));
    Ids stream;
    for (std::int64_t d = 0; d < samples.indices().document_index.size(); ++d) {
      const Ids part = data->sequence(samples.indices().document_index[d]);
      stream.insert(stream.end(), part.begin(), part.end());
    }
    for (std::int64_t i = 0; i < samples.size(); ++i) {
      const Sample sample = fetch(samples, i);
      const auto at = stream.begin() + samples.indices().shuffle_index[i] * s;
      EXPECT_EQ(sample.tokens, Ids(at, at + s));
      EXPECT_EQ(sample.labels, Ids(at + 1, at + s + 1));
    }
    EXPECT_THROW(fetch(samples, samples.size()), InvalidArgument);
    EXPECT_THROW(fetch(samples, -1), InvalidArgument);
  }
}

/// Numbers of a cached index that only the lengths of documents give away are met when they are used.
TEST(GptDataset, RowsOfOtherDataAreRefusedWhenRead) {
  const ScratchFolder folder;
  write_counting(folder / "d", {7, 5, 11, 6});
  auto data = std::make_shared<IndexedDataset>(folder / "d");
  GptDatasetOptions options = plain(4, 20);
  options.use_cache = true;
  options.cache_folder = folder / "cache";
  GptDataset(data, {0, 4}, options);
  std::string description, rows;
  for (const auto& entry : std::filesystem::directory_iterator(folder / "cache")) {
    const std::string path = entry.path().string();
    if (path.ends_with("description.txt")) description = path;
    if (path.ends_with("sample_index.npy")) rows = path;
  }
  std::string bytes = slurp(rows), list = slurp(description);
  const auto sum = [&] { return files::hex(content_hash(std::as_bytes(std::span(bytes)).subspan(128))); };
  const std::string before = sum();
  const std::int32_t planted = 1000;
  std::memcpy(bytes.data() + bytes.size() - 4, &planted, 4);
  spill(description, list.replace(list.find(before), before.size(), sum()));
  spill(rows, bytes);
  const GptDataset samples(data, {0, 4}, options);
  EXPECT_EQ(samples.cache_use(), CacheUse::loaded);
  mentions(message_of<DataError>([&] {
             for (std::int64_t i = 0; i < samples.size(); ++i) fetch(samples, i);
           }),
           {"sample row"});
}

TEST(GptDataset, DocumentEnds) {
  const ScratchFolder folder;
  IndexedDatasetWriter writer(folder / "d", DType::u16);
  writer.add_document(Ids{1, 2, 9, 3, 9, 9, 4, 5, 6});
  writer.finish();
  auto data = std::make_shared<IndexedDataset>(folder / "d");
  GptDatasetOptions options = plain(8);
  options.end_of_document = 9;
  options.reset_position_ids = options.reset_attention_mask = options.eod_mask_loss = true;
  const GptDataset all(data, {0, 1}, options);
  ASSERT_EQ(all.size(), 1);
  const Sample sample = fetch(all, 0);
  EXPECT_EQ(sample.tokens, (Ids{1, 2, 9, 3, 9, 9, 4, 5}));
  EXPECT_EQ(sample.labels, (Ids{2, 9, -100, 9, -100, -100, 5, 6}));
  EXPECT_EQ(sample.position_ids, (Ids{0, 1, 2, 0, 1, 0, 0, 1}));
  EXPECT_EQ(sample.document_ids, (Ids{0, 0, 0, 1, 1, 2, 3, 3}));
  options.reset_position_ids = options.eod_mask_loss = false;
  const Sample masked = fetch(GptDataset(data, {0, 1}, options), 0);
  EXPECT_TRUE(masked.position_ids.empty());
  EXPECT_EQ(masked.labels, (Ids{2, 9, 3, 9, 9, 4, 5, 6}));
  EXPECT_EQ(masked.document_ids, sample.document_ids);
  options.end_of_document = -1;
  EXPECT_THROW(GptDataset(data, {0, 1}, options), InvalidArgument);
}

TEST(GptDataset, LastPartialValidationSample) {
  const ScratchFolder folder;
  write_counting(folder / "d", {6, 5});  // 11 tokens: two samples of 4, and 2 targets more
  auto data = std::make_shared<IndexedDataset>(folder / "d");
  GptDatasetOptions options = plain(4);
  options.split = Split::valid;
  options.drop_last_partial = false;
  const GptDataset samples(data, {0, 2}, options);
  ASSERT_EQ(samples.size(), 3);
  std::int64_t targets = 0;
  int short_ones = 0;
  for (std::int64_t i = 0; i < 3; ++i) {
    const Sample sample = fetch(samples, i);
    const auto ignored = std::count(sample.labels.begin(), sample.labels.end(), kIgnoredLabel);
    targets += 4 - ignored;
    if (ignored > 0) {
      ++short_ones;
      EXPECT_EQ(sample.tokens[3], 0);
      EXPECT_EQ(sample.labels[2], kIgnoredLabel);
      EXPECT_NE(sample.labels[1], kIgnoredLabel);
    }
  }
  EXPECT_EQ(short_ones, 1);
  EXPECT_EQ(targets, 10);
  options.drop_last_partial = true;
  EXPECT_EQ(GptDataset(data, {0, 2}, options).size(), 2);
}

TEST(GptDataset, CacheBesideTheData) {
  const ScratchFolder folder;
  write_counting(folder / "d", {60, 50});
  auto data = std::make_shared<IndexedDataset>(folder / "d");
  GptDatasetOptions options = plain(4, 100);
  options.use_cache = true;
  const GptDataset built(data, {0, 2}, options);
  EXPECT_EQ(built.cache_use(), CacheUse::saved) << built.cache_note();
  EXPECT_TRUE(std::filesystem::is_directory(folder / "d/cache/GPTDataset_indices"));
  const GptDataset loaded(data, {0, 2}, options);
  EXPECT_EQ(loaded.cache_use(), CacheUse::loaded) << loaded.cache_note();
  for (std::int64_t i = 0; i < built.size(); ++i) EXPECT_EQ(fetch(built, i).tokens, fetch(loaded, i).tokens);
}

TEST(GptDataset, WrongVocabularyAndShrunkenFile) {
  const ScratchFolder folder;
  write_counting(folder / "d", {40}, 30);
  auto data = std::make_shared<IndexedDataset>(folder / "d", IndexedDatasetOptions{.vocab_size = 29});
  const GptDataset samples(data, {0, 1}, plain(39));
  mentions(message_of<DataError>([&] { fetch(samples, 0); }),
           {"d.bin", "document 0", "position 29", "id 29"});
  std::filesystem::resize_file(folder / "d.bin", 60);
  mentions(message_of<DataError>([&] { fetch(samples, 0); }), {"d.bin", "while it was in use"});
}

/// What is read may be other data by then: the size is looked at now and then.
TEST(GptDataset, AFileWrittenAnewIsSeen) {
  const ScratchFolder folder;
  write_counting(folder / "d", {40});
  const GptDataset samples(std::make_shared<IndexedDataset>(folder / "d"), {0, 1}, plain(39));
  fetch(samples, 0);
  std::filesystem::resize_file(folder / "d.bin", 90);
  mentions(message_of<DataError>([&] {
             for (int i = 0; i < 16; ++i) fetch(samples, 0);
           }),
           {"d.bin", "changed from 80 to 90"});
}

TEST(BuildGptData, SplitsOfOneDataset) {
  const ScratchFolder folder;
  write_counting(folder / "d", std::vector<std::int32_t>(10, 21));
  GptDataOptions options;
  options.members = {{std::nullopt, folder / "d"}};
  options.split = "8,2,0";
  options.num_samples = {20, 3, std::nullopt};
  options.dataset = plain(10);
  const GptData data = build_gpt_data(options);
  EXPECT_GE(data.train->size(), 20);
  EXPECT_EQ(data.valid->size(), 4);
  EXPECT_EQ(data.test, nullptr);
  for (std::int64_t i = 0; i < data.valid->size(); ++i)
    EXPECT_GE(fetch(*data.valid, i).tokens.front(), 8 * 21);
  options.split = "969,30,1";
  mentions(message_of<DataError>([&] { build_gpt_data(options); }), {"valid split", "[10, 10)", "3 samples"});
  options.num_samples = {20, 0, 0};
  EXPECT_EQ(build_gpt_data(options).valid, nullptr);
}

/// As Megatron's --train-data-path and its siblings: each split whole, of data of its own, and drawn as a
/// blend of one split is.
TEST(BuildGptData, DataOfItsOwnForEachSplit) {
  const ScratchFolder folder;
  write_counting(folder / "a", std::vector<std::int32_t>(6, 50), 100);
  write_counting(folder / "b", std::vector<std::int32_t>(4, 60), 77);
  write_counting(folder / "v", std::vector<std::int32_t>(3, 21), 40);
  GptDataOptions options;
  options.dataset = plain(10);
  options.num_samples = {40, 5, 0};
  options.split_members = {std::vector<BlendMember>{{3.0, folder / "a"}, {1.0, folder / "b"}},
                           std::vector<BlendMember>{{std::nullopt, folder / "v"}},
                           std::vector<BlendMember>{}};
  const GptData apart = build_gpt_data(options);
  EXPECT_EQ(apart.test, nullptr);
  const auto alone = [&](std::size_t which, const char* split) {
    GptDataOptions one = options;
    one.members = options.split_members[which];
    one.split_members = {};
    one.split = split;
    return build_gpt_data(one);
  };
  const auto same = [](const Dataset& x, const Dataset& y) {
    ASSERT_EQ(x.size(), y.size());
    for (std::int64_t i = 0; i < x.size(); ++i) EXPECT_EQ(fetch(x, i).tokens, fetch(y, i).tokens) << i;
  };
  same(*apart.train, *alone(0, "1,0,0").train);
  same(*apart.valid, *alone(1, "0,1,0").valid);
}

TEST(BuildGptData, WeightedBlend) {
  const ScratchFolder folder;
  write_counting(folder / "a", std::vector<std::int32_t>(6, 50), 100);
  IndexedDatasetWriter writer(folder / "b", DType::i32);
  writer.add_document(Ids(500, 1000));
  writer.finish();
  GptDataOptions options;
  options.members = {{3.0, folder / "a"}, {1.0, folder / "b"}};
  options.split = "1";
  options.num_samples = {41, std::nullopt, std::nullopt};
  options.dataset = plain(10);
  const GptData data = build_gpt_data(options);
  ASSERT_EQ(data.train->size(), 42);  // ceil(41 * .75) + ceil(41 * .25)
  int from_b = 0;
  for (std::int64_t i = 0; i < 42; ++i) from_b += fetch(*data.train, i).tokens.front() == 1000 ? 1 : 0;
  EXPECT_NEAR(from_b, 10.5, 0.6);
  options.num_samples[0] = std::nullopt;
  EXPECT_THROW(build_gpt_data(options), ConfigError);
  options.members[1].weight = std::nullopt;
  EXPECT_THROW(build_gpt_data(options), ConfigError);
  options.members[0].weight = std::nullopt;  // by size: every sample once
  const GptData all = build_gpt_data(options);
  EXPECT_EQ(all.train->size(), (300 - 1) / 10 + (500 - 1) / 10);
  options.num_samples[0] = 30;
  EXPECT_EQ(build_gpt_data(options).train->size(), 30);
}

TEST(BlendedDataset, MembersMustFit) {
  const ScratchFolder folder;
  write_counting(folder / "d", {41});
  auto data = std::make_shared<IndexedDataset>(folder / "d");
  auto four = std::make_shared<GptDataset>(data, ElementRange{0, 1}, plain(4));
  auto five = std::make_shared<GptDataset>(data, ElementRange{0, 1}, plain(5));
  const std::vector<double> weights = {1, 1};
  EXPECT_THROW(BlendedDataset({four, five}, weights, 4), InvalidArgument);
  EXPECT_THROW(BlendedDataset({four, four}, weights, 30), InvalidArgument);
  EXPECT_THROW(BlendedDataset({}, {}, 1), InvalidArgument);
  EXPECT_EQ(BlendedDataset({four, four}, weights, 20).size(), 20);
}

}  // namespace
}  // namespace tessera
