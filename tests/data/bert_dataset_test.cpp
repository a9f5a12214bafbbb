#include "tessera/data/bert_dataset.hpp"

#include <numeric>

#include "raw_files.hpp"
#include "tessera/data/batch.hpp"
#include "tessera/data/indexed_writer.hpp"

namespace tessera {
namespace {

using namespace testing;

using Tokens = std::vector<std::int32_t>;

/// Sentences of documents as .idx and .bin.
void write_sentences(const std::string& prefix, const std::vector<std::vector<Tokens>>& documents) {
  IndexedDatasetWriter writer(prefix, DType::u16);
  for (const auto& document : documents) {
    for (const Tokens& sentence : document) writer.add_sequence(sentence);
    writer.end_document();
  }
  writer.finish();
}

const std::vector<Tokens> kSentences = {
    {4, 5, 6, 7, 8, 9}, {10, 30, 11, 12, 31, 32, 13}, {14, 15, 16, 17, 18}, {19, 33, 20, 21, 22, 23, 24}};

BertDatasetOptions golden_options() {
  BertDatasetOptions options;
  options.seq_length = 26;
  options.vocab_size = 40;
  options.special = {.cls = 1, .sep = 2, .mask = 3, .pad = 0, .continuations = {30, 31, 32, 33, 34, 35}};
  options.short_seq_prob = 0;
  options.use_cache = false;
  return options;
}

std::vector<bool> golden_continues() {
  std::vector<bool> continues(40);
  std::fill(continues.begin() + 30, continues.begin() + 36, true);
  return continues;
}

struct GoldenSample {
  std::int32_t second;
  bool swapped;
  Tokens before;
  struct Masked {
    std::size_t position;
    std::int32_t label, written;
  };
  std::vector<Masked> masked;
};

/// What Megatron's dataset gives for these sentences.
const std::vector<GoldenSample> kGolden = {
    {16,
     false,
     {1, 5, 6, 7, 8, 9, 10, 30, 11, 12, 31, 32, 13, 14, 15, 2, 19, 33, 20, 21, 22, 23, 24, 2},
     {{9, 12, 3}, {10, 31, 3}, {11, 32, 3}}},
    {16,
     false,
     {1, 5, 6, 7, 8, 9, 10, 30, 11, 12, 31, 32, 13, 14, 15, 2, 19, 33, 20, 21, 22, 23, 24, 2},
     {{2, 6, 6}, {3, 7, 7}, {20, 22, 3}}},
    {13,
     true,
     {1, 15, 16, 17, 18, 19, 33, 20, 21, 22, 23, 24, 2, 6, 7, 8, 9, 10, 30, 11, 12, 31, 32, 2},
     {{2, 16, 3}, {3, 17, 3}, {4, 18, 3}}},
    {13,
     false,
     {1, 5, 6, 7, 8, 9, 10, 30, 11, 12, 31, 32, 2, 16, 17, 18, 19, 33, 20, 21, 22, 23, 24, 2},
     {{5, 9, 3}, {19, 21, 3}, {20, 22, 3}}},
};

TEST(BertDataset, SamplesAreMegatrons) {
  for (std::size_t i = 0; i < kGolden.size(); ++i) {
    const GoldenSample& golden = kGolden[i];
    const BertSample sample =
        make_bert_sample(kSentences, 21, static_cast<std::int64_t>(i), golden_options(), golden_continues());
    Tokens tokens = golden.before, labels(tokens.size(), kIgnoredLabel);
    for (const auto& [position, label, written] : golden.masked) {
      EXPECT_EQ(tokens[position], label);
      tokens[position] = written;
      labels[position] = label;
    }
    EXPECT_EQ(sample.tokens, tokens) << i;
    EXPECT_EQ(sample.labels, labels) << i;
    EXPECT_EQ(sample.second, golden.second) << i;
    EXPECT_EQ(sample.swapped, golden.swapped) << i;
  }
}

/// Padding has type 0, lies behind key_end and is never learned, whatever its id.
TEST(BertDataset, PadsSamples) {
  const ScratchFolder folder;
  write_sentences(folder / "d", {kSentences});
  BertDatasetOptions options = golden_options();
  options.num_samples = 4;
  options.special.pad = 7;
  const BertDataset data(std::make_shared<IndexedDataset>(folder / "d"), {0, 1}, options);
  ASSERT_GE(data.size(), 4);
  EXPECT_EQ(data.fields(), (SampleFields{.token_types = true, .key_end = true, .sample_label = true}));
  for (std::int64_t i = 0; i < 4; ++i) {
    Tokens tokens(26), labels(26), types(26), end(1), label(1);
    data.fetch(
        i, {.tokens = tokens, .labels = labels, .token_types = types, .key_end = end, .sample_label = label});
    // Two sentences fill no sample of 23 tokens: all four make one.
    EXPECT_EQ(end[0], 26);
    BertDatasetOptions shorter = options;
    shorter.seq_length = 40;
    const BertDataset padded(std::make_shared<IndexedDataset>(folder / "d"), {0, 1}, shorter);
    Tokens more(40, 1), more_labels(40, 1), more_types(40, 1);
    padded.fetch(i, {.tokens = more,
                     .labels = more_labels,
                     .token_types = more_types,
                     .key_end = end,
                     .sample_label = label});
    EXPECT_EQ(end[0], 28);  // 25 tokens and three special ones
    for (std::size_t at = 28; at < 40; ++at) {
      EXPECT_EQ(more[at], 7);
      EXPECT_EQ(more_labels[at], kIgnoredLabel);
      EXPECT_EQ(more_types[at], 0);
    }
    EXPECT_EQ(more_types[27], 1);
    EXPECT_EQ(more_types[0], 0);
  }
}

/// Without the binary head: one segment, of as little as one sentence.
TEST(BertDataset, OneSegmentWithoutTheBinaryHead) {
  const ScratchFolder folder;
  write_sentences(folder / "d", {{{4, 5, 6}}, {{7, 8, 9, 10, 11}}});
  BertDatasetOptions options = golden_options();
  options.binary_head = false;
  options.num_samples = 6;
  const BertDataset data(std::make_shared<IndexedDataset>(folder / "d"), {0, 2}, options);
  EXPECT_EQ(data.size(), 6);
  EXPECT_EQ(data.fields(), (SampleFields{.key_end = true}));
  Tokens tokens(26), labels(26), end(1);
  for (std::int64_t i = 0; i < 6; ++i) {
    data.fetch(i, {.tokens = tokens, .labels = labels, .key_end = end});
    EXPECT_EQ(tokens[static_cast<std::size_t>(end[0]) - 1], 2);
    EXPECT_EQ(std::count(tokens.begin(), tokens.begin() + end[0], 2), 1);
    EXPECT_EQ(26 - std::count(labels.begin(), labels.end(), kIgnoredLabel), 1);
  }
}

/// [ran with Megatron's helper]
TEST(SentenceMap, IsMegatrons) {
  const std::vector<std::int32_t> lengths = {20, 30, 25, 40, 10, 12, 14, 16, 33, 600};
  SentenceMapRequest request;
  request.max_length = 61;
  request.min_sentences = 1;
  request.num_samples = 6;
  request.short_seq_prob = 0;
  const IntArray rows = build_sentence_map(lengths, {0, 3, 4, 8, 10}, request, "here");
  const std::vector<std::int64_t> expected = {4, 8, 61, 3, 4, 61, 0, 3, 61, 4, 8, 61, 3, 4, 61, 0, 3, 61};
  std::vector<std::int64_t> found(static_cast<std::size_t>(rows.size()));
  rows.read(0, found);
  EXPECT_EQ(found, expected);
}

TEST(SentenceMap, SomeSamplesAreShort) {
  const std::vector<std::int32_t> lengths(4000, 10);
  std::vector<std::int64_t> begins;
  for (std::int64_t d = 0; d <= 4000; d += 20) begins.push_back(d);
  SentenceMapRequest request;
  request.max_length = 50;
  const auto rows_of = [&] {
    const IntArray rows = build_sentence_map(lengths, begins, request, "here");
    std::vector<std::int64_t> out(static_cast<std::size_t>(rows.size()));
    rows.read(0, out);
    return out;
  };
  const auto rows = rows_of();
  EXPECT_EQ(rows, rows_of());
  std::vector<bool> seen(4000);
  std::int64_t shorter = 0;
  for (std::size_t i = 0; i < rows.size(); i += 3) {
    EXPECT_GE(rows[i + 1] - rows[i], 2);
    for (std::int64_t s = rows[i]; s < rows[i + 1]; ++s) {
      EXPECT_FALSE(seen[static_cast<std::size_t>(s)]);
      seen[static_cast<std::size_t>(s)] = true;
    }
    shorter += rows[i + 2] < 50 ? 1 : 0;
  }
  EXPECT_EQ(std::count(seen.begin(), seen.end(), false), 0);
  const double share = static_cast<double>(shorter) / (static_cast<double>(rows.size()) / 3);
  EXPECT_GT(share, 0.05);
  EXPECT_LT(share, 0.16);
  request.short_seq_prob = 0;
  const auto all_full = rows_of();
  for (std::size_t i = 2; i < all_full.size(); i += 3) EXPECT_EQ(all_full[i], 50);
}

TEST(SentenceMap, IsKeptAndCheckedWhenRead) {
  const ScratchFolder folder;
  write_sentences(folder / "d", {kSentences, kSentences, {kSentences[0]}});
  const auto data = std::make_shared<IndexedDataset>(folder / "d");
  BertDatasetOptions options = golden_options();
  options.use_cache = true;
  options.num_samples = 10;
  const BertDataset made(data, {0, 3}, options);
  EXPECT_EQ(made.map().cache, CacheUse::saved);
  const BertDataset again(data, {0, 3}, options);
  EXPECT_EQ(again.map().cache, CacheUse::loaded);
  EXPECT_EQ(again.size(), made.size());
  for (const auto& entry :
       std::filesystem::directory_iterator(folder / "d/cache/BERTMaskedWordPieceDataset_indices")) {
    if (entry.path().extension() != ".npy") continue;
    std::string bytes = slurp(entry.path().string());
    bytes[bytes.size() - 8] = 99;
    spill(entry.path().string(), bytes);
  }
  const BertDataset rebuilt(data, {0, 3}, options);
  EXPECT_EQ(rebuilt.map().cache, CacheUse::saved);
  mentions(rebuilt.map().note, {"sample_index.npy", "built anew"});
  options.seed = 7;
  EXPECT_EQ(BertDataset(data, {0, 3}, options).map().cache, CacheUse::saved);
}

TEST(BertDataset, RefusesWhatGivesNoSamples) {
  const ScratchFolder folder;
  write_sentences(folder / "d", {{{4, 5, 6}}, {{7, 8}}, {{4}, Tokens(600, 5)}, {}});
  const auto data = std::make_shared<IndexedDataset>(folder / "d");
  BertDatasetOptions options = golden_options();
  options.num_samples = 3;
  const auto fails = [&](const BertDatasetOptions& with) {
    return message_of<Error>([&] { BertDataset(data, {0, 4}, with); });
  };
  mentions(fails(options), {"none of its 4 documents", "3 have fewer than 2 sentences",
                            "1 a sentence of more than 512 tokens", "--split-sentences"});
  options.seq_length = 4;
  mentions(fails(options), {"training.seq_length 4 is too short", "5"});
  options = golden_options();
  options.special.mask = -1;
  mentions(fails(options), {"[MASK]", "data.mask_id"});
  options = golden_options();
  options.masking.mask_prob = 1;
  mentions(fails(options), {"mask_prob 1"});
}

/// data.split shares out documents, and blends take members in turn.
TEST(BuildBertData, SplitsDocumentsAndBlends) {
  const ScratchFolder folder;
  write_sentences(folder / "a", std::vector<std::vector<Tokens>>(10, kSentences));
  write_sentences(folder / "b", std::vector<std::vector<Tokens>>(6, kSentences));
  BertDataOptions options;
  options.members = {{std::nullopt, folder / "a"}};
  options.split = "8,2,0";
  options.num_samples = {30, 4, 0};
  options.dataset = golden_options();
  const DatasetSplits one = build_bert_data(options);
  EXPECT_EQ(one.train->size(), 32);  // whole epochs of 8 samples
  EXPECT_EQ(one.valid->size(), 4);
  EXPECT_EQ(one.test, nullptr);
  options.members = {{0.5, folder / "a"}, {0.5, folder / "b"}};
  const DatasetSplits two = build_bert_data(options);
  EXPECT_EQ(two.train->size(), 30);
  EXPECT_TRUE(two.train->fields().sample_label);
  options.members = {{std::nullopt, folder / "a"}};
  options.split = "1,0.0001,0";
  mentions(message_of<DataError>([&] { build_bert_data(options); }),
           {"valid split", "documents [10, 10) of 10"});
}

}  // namespace
}  // namespace tessera
