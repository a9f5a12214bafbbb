#include "tessera/data/t5_dataset.hpp"

#include "raw_files.hpp"
#include "tessera/data/batch.hpp"
#include "tessera/data/indexed_writer.hpp"
#include "tessera/data/loader.hpp"

namespace tessera {
namespace {

using namespace testing;

using Tokens = std::vector<std::int32_t>;

const std::vector<Tokens> kSentences = {
    {4, 5, 6, 7, 8, 9}, {10, 30, 11, 12, 31, 32, 13}, {14, 15, 16, 17, 18}, {19, 33, 20, 21, 22, 23, 24}};

T5DatasetOptions golden_options() {
  T5DatasetOptions options;
  options.encoder_length = 26;
  options.decoder_length = 8;
  options.vocab_size = 40;
  options.special = {.pad = 0,
                     .bos = 36,
                     .eos = 37,
                     .sentinels = {100, 101, 102, 103},
                     .continuations = {30, 31, 32, 33, 34, 35}};
  options.short_seq_prob = 0;
  options.use_cache = false;
  return options;
}

std::vector<bool> golden_continues() {
  std::vector<bool> continues(36);
  std::fill(continues.begin() + 30, continues.end(), true);
  return continues;
}

void write_sentences(const std::string& prefix, std::int64_t documents) {
  IndexedDatasetWriter writer(prefix, DType::u16);
  for (std::int64_t d = 0; d < documents; ++d) {
    for (const Tokens& sentence : kSentences) writer.add_sequence(sentence);
    writer.end_document();
  }
  writer.finish();
}

/// What Megatron's dataset gives for these sentences.
TEST(T5Dataset, SamplesAreMegatrons) {
  const std::vector<Tokens> golden = {
      {36, 100, 7, 8, 9}, {36, 100, 9, 10, 30}, {36, 100, 9, 10, 30}, {36, 100, 20, 21, 101, 23}};
  T5Sample sample;
  for (std::size_t i = 0; i < golden.size(); ++i) {
    sample =
        make_t5_sample(kSentences, 24, static_cast<std::int64_t>(i), golden_options(), golden_continues());
    EXPECT_EQ(sample.tokens, golden[i]) << i;
    Tokens labels(golden[i].begin() + 1, golden[i].end());
    labels.push_back(37);
    EXPECT_EQ(sample.labels, labels) << i;
  }
  const Tokens expected = {4,  5,  6,  7,  8,  9,  10, 30, 11,  12, 31, 32,
                           13, 14, 15, 16, 17, 18, 19, 33, 100, 22, 101};
  EXPECT_EQ(sample.encoder_tokens, expected);
}

/// A batch has both sequences, padded behind their ends.
TEST(T5Dataset, FillsBatches) {
  const ScratchFolder folder;
  write_sentences(folder / "d", 2);
  T5DataOptions options;
  options.members = {{std::nullopt, folder / "d"}};
  options.split = "1,0,0";
  options.num_samples = {4, 0, 0};
  options.dataset = golden_options();
  const DatasetSplits data = build_t5_data(options);
  ASSERT_GE(data.train->size(), 4);
  EXPECT_EQ(data.train->seq_length(), 8);
  EXPECT_EQ(data.train->fields(), (SampleFields{.encoder_length = 26}));
  DataLoader loader(data.train, {.global_batch_size = 4, .micro_batch_size = 2});
  const auto batch = loader.next();
  ASSERT_TRUE(batch.has_value());
  validate(*batch, 110);
  EXPECT_EQ(batch->encoder_seq_length, 26);
  const std::int64_t numbers[] = {3, 0};
  const Batch read = read_samples(*data.train, numbers);
  EXPECT_EQ(read.batch, 2);
  EXPECT_EQ(read.encoder_key_end, (Tokens{23, 22}));
  EXPECT_EQ(read.tokens, (Tokens{36, 100, 20, 21, 101, 23, 0, 0, 36, 100, 7, 8, 9, 0, 0, 0}));
  EXPECT_EQ(read.labels, (Tokens{100, 20, 21, 101, 23, 37, -100, -100, 100, 7, 8, 9, 37, -100, -100, -100}));
  EXPECT_EQ(std::count(read.encoder_tokens.begin(), read.encoder_tokens.end(), 0), 3 + 4);
  const auto first = std::span(batch->encoder_tokens).first(26);
  EXPECT_TRUE(std::ranges::equal(first, std::span(read.encoder_tokens).last(26)));
  EXPECT_EQ(batch->encoder_key_end.front(), 22);
}

TEST(T5Tokens, FollowTheVocabulary) {
  const auto added = [](SpecialTokens special, std::int64_t ids, std::int64_t extra) {
    add_t5_tokens(special, ids, extra);
    return std::pair(special, ids);
  };
  // Megatron's: [BOS], [EOS] and sentinels behind it, as far as they are not there.
  EXPECT_EQ(added({.pad = 0}, 30, 3),
            (std::pair(SpecialTokens{.pad = 0, .bos = 30, .eos = 31, .sentinels = {32, 33, 34}},
                       std::int64_t{35})));
  EXPECT_EQ(added({.pad = 0, .bos = 5, .eos = 6}, 30, 1),
            (std::pair(SpecialTokens{.pad = 0, .bos = 5, .eos = 6, .sentinels = {30}}, std::int64_t{31})));
  // T5's: they are there, and the decoder begins with padding.
  const SpecialTokens own{.pad = 0, .eos = 1, .sentinels = {29, 28, 27}};
  EXPECT_EQ(added(own, 30, 0).first.sentinels, own.sentinels);
  EXPECT_EQ(added(own, 30, 0).first.bos, 0);
  EXPECT_EQ(added(own, 30, 2).first.sentinels, (Tokens{29, 28}));
  EXPECT_EQ(sentinels_between(29, 27), own.sentinels);
  mentions(message_of<ConfigError>([&] { added(own, 30, 4); }), {"vocab_extra_ids is 4", "has 3"});
  mentions(message_of<ConfigError>([] { check_t5_tokens({.pad = 0, .eos = 1}); }),
           {"<extra_id_0>", "data.vocab_extra_ids"});
  mentions(message_of<ConfigError>([] { check_t5_tokens({.eos = 1, .sentinels = {3}}); }),
           {"[PAD]", "data.pad_id"});
}

TEST(T5Dataset, RefusesWhatDoesNotFit) {
  const ScratchFolder folder;
  write_sentences(folder / "d", 1);
  const auto data = std::make_shared<IndexedDataset>(folder / "d");
  T5DatasetOptions options = golden_options();
  options.num_samples = 4;
  const auto fails = [&](const T5DatasetOptions& with) {
    return message_of<Error>([&] { T5Dataset(data, {0, 1}, with); });
  };
  options.decoder_length = 4;
  mentions(fails(options), {"3 are left out", "a decoder of 4", "training.decoder_seq_length"});
  options.decoder_length = 5;
  const T5Dataset narrow(data, {0, 1}, options);
  const std::int64_t three[] = {3};
  mentions(message_of<DataError>([&] { read_samples(narrow, three); }),
           {"sample 3 has 6 tokens in the decoder", "raise it to 7"});
  options = golden_options();
  options.special.sentinels = {100};
  mentions(message_of<DataError>([&] { make_t5_sample(kSentences, 24, 3, options, golden_continues()); }),
           {"leaves out", "1 sentinels", "data.vocab_extra_ids"});
  options = golden_options();
  options.encoder_length = 3;
  mentions(fails(options), {"an encoder of 3"});
  options = golden_options();
  options.masking.mask_prob = 0.01;
  mentions(fails(options), {"less than one token"});
}

}  // namespace
}  // namespace tessera
