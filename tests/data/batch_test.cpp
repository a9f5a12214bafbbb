#include "tessera/data/batch.hpp"

#include <numeric>

#include "raw_files.hpp"
#include "tessera/base/error.hpp"

namespace tessera {
namespace {

using namespace testing;

using Ids = std::vector<std::int32_t>;

Batch make(std::int64_t b, std::int64_t s) {
  Batch batch{.batch = b, .seq_length = s};
  batch.tokens.resize(static_cast<std::size_t>(b * s));
  std::iota(batch.tokens.begin(), batch.tokens.end(), 0);
  batch.labels = batch.tokens;
  return batch;
}

TEST(Batch, CountTargets) {
  Batch batch = make(2, 3);
  EXPECT_EQ(count_targets(batch), 6);
  batch.labels[1] = batch.labels[5] = -100;
  EXPECT_EQ(count_targets(batch), 4);
}

TEST(Batch, SliceTakesWholeSamples) {
  Batch batch = make(5, 3);
  batch.position_ids = batch.document_ids = batch.tokens;
  batch.key_begin = {0, 1, 2, 0, 1};
  batch.key_end = {3, 3, 3, 2, 2};
  batch.sample0 = 40;
  const Batch piece = slice(batch, 3, 2);
  EXPECT_EQ(piece.batch, 2);
  EXPECT_EQ(piece.tokens, (Ids{9, 10, 11, 12, 13, 14}));
  EXPECT_EQ(piece.labels, piece.tokens);
  EXPECT_EQ(piece.position_ids, piece.tokens);
  EXPECT_EQ(piece.document_ids, piece.tokens);
  EXPECT_EQ(piece.key_begin, (Ids{0, 1}));
  EXPECT_EQ(piece.key_end, (Ids{2, 2}));
  EXPECT_EQ(piece.sample0, 43);
  EXPECT_TRUE(slice(make(2, 3), 0, 1).position_ids.empty());
  EXPECT_THROW(slice(batch, 4, 2), InvalidArgument);
  EXPECT_THROW(slice(batch, -1, 2), InvalidArgument);
}

TEST(Batch, SampleNumbersInRuns) {
  Batch batch = make(6, 1);  // rank 1 of 3, micro-batch 2: samples 2 3 | 8 9 | 14 15
  batch.sample0 = 2;
  batch.sample_block = 2;
  batch.sample_stride = 6;
  std::vector<std::int64_t> numbers;
  for (int i = 0; i < 6; ++i) numbers.push_back(global_sample(batch, i));
  EXPECT_EQ(numbers, (std::vector<std::int64_t>{2, 3, 8, 9, 14, 15}));
  const Batch micro = slice(batch, 4, 2);
  EXPECT_EQ(global_sample(micro, 0), 14);
  EXPECT_EQ(global_sample(micro, 1), 15);
  const Batch two = slice(batch, 2, 4);
  EXPECT_EQ(global_sample(two, 1), 9);
  EXPECT_EQ(global_sample(two, 2), 14);
  EXPECT_EQ(global_sample(slice(batch, 3, 1), 0), 9);
  EXPECT_THROW(slice(batch, 1, 2), InvalidArgument);
}

TEST(Batch, ValidateNamesThePlace) {
  EXPECT_NO_THROW(validate(make(2, 3), 6));
  EXPECT_NO_THROW(validate(make(2, 3), 0));
  Batch batch = make(2, 3);
  batch.sample0 = 10;
  mentions(message_of<DataError>([&] { validate(batch, 5); }),
           {"sample 11", "position 2", "token 5", "[0, 5)"});
  batch.tokens[5] = 0;
  mentions(message_of<DataError>([&] { validate(batch, 5); }), {"label 5"});
  batch.labels[5] = -100;
  EXPECT_NO_THROW(validate(batch, 5));
  batch.labels[0] = -1;
  EXPECT_THROW(validate(batch, 5), DataError);
  batch.labels[0] = 0;
  batch.position_ids = Ids(6, 8);
  EXPECT_EQ(position_count(batch), 9);
  EXPECT_NO_THROW(validate(batch, 5, 9));
  mentions(message_of<DataError>([&] { validate(batch, 5, 8); }), {"sample 10", "position 8", "[0, 8)"});
  batch.position_ids = {0};
  EXPECT_THROW(validate(batch, 5), InvalidArgument);
  batch.position_ids.clear();
  batch.key_begin = {0, 2};
  batch.key_end = {3, 1};
  mentions(message_of<DataError>([&] { validate(batch, 5); }), {"sample 11", "[2, 1)"});
  batch.key_end = {3, 4};
  EXPECT_THROW(validate(batch, 5), DataError);
  EXPECT_THROW(validate(Batch{}, 5), InvalidArgument);
}

TEST(Batch, OfAnEncoderAndADecoder) {
  Batch batch = make(3, 2);
  EXPECT_NO_THROW(validate_extras(batch, 0, 0));
  mentions(message_of<InvalidArgument>([&] { validate_extras(batch, 0, 0, true); }), {"no encoder_tokens"});
  batch.encoder_seq_length = 4;
  mentions(message_of<InvalidArgument>([&] { validate(batch, 12); }), {"encoder_tokens", "0", "12"});
  batch.encoder_tokens.resize(12);
  std::iota(batch.encoder_tokens.begin(), batch.encoder_tokens.end(), 0);
  batch.encoder_key_begin = {0, 1, 2};
  batch.encoder_key_end = {4, 3, 4};
  EXPECT_NO_THROW(validate(batch, 12));
  EXPECT_NO_THROW(validate_extras(batch, 0, 0, true));
  mentions(message_of<InvalidArgument>([&] { validate_extras(batch, 0, 0); }),
           {"encoder_tokens", "no encoder"});
  const Batch piece = slice(batch, 1, 2);
  EXPECT_EQ(piece.encoder_seq_length, 4);
  EXPECT_EQ(piece.encoder_tokens, (Ids{4, 5, 6, 7, 8, 9, 10, 11}));
  EXPECT_EQ(piece.encoder_key_begin, (Ids{1, 2}));
  EXPECT_EQ(piece.encoder_key_end, (Ids{3, 4}));
  mentions(message_of<DataError>([&] { validate(batch, 11); }),
           {"sample 2", "position 3", "token of the encoder 11"});
  batch.encoder_key_end = {4, 5, 4};
  mentions(message_of<DataError>([&] { validate(batch, 12); }), {"sample 1", "encoder [1, 5) of 4"});
  batch.encoder_key_end.clear();
  batch.document_ids = Ids(6, 0);
  mentions(message_of<InvalidArgument>([&] { validate_extras(batch, 0, 0, true); }), {"document_ids"});
}

}  // namespace
}  // namespace tessera
