#include "tessera/data/indexed_writer.hpp"

#include "raw_files.hpp"

namespace tessera {
namespace {

using namespace testing;

using Ids = std::vector<std::int32_t>;

TEST(IndexedDatasetWriter, BytesAreSpelledOut) {
  const ScratchFolder folder;
  IndexedDatasetWriter writer(folder / "w", token_dtype(50257));
  writer.add_sequence(Ids{258, 1});
  writer.add_sequence(Ids{3});
  writer.end_document();
  writer.end_document();  // an empty document
  writer.add_document(Ids{65499, 0, 7});
  EXPECT_EQ(writer.documents(), 3);
  EXPECT_FALSE(std::filesystem::exists(folder / "w.idx"));
  writer.finish();
  const std::string expected(
      "MMIDIDX\0\0"
      "\x01\0\0\0\0\0\0\0"
      "\x08"
      "\x03\0\0\0\0\0\0\0"
      "\x04\0\0\0\0\0\0\0"
      "\x02\0\0\0\x01\0\0\0\x03\0\0\0"
      "\0\0\0\0\0\0\0\0\x04\0\0\0\0\0\0\0\x06\0\0\0\0\0\0\0"
      "\0\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0",
      34 + 12 + 24 + 32);
  EXPECT_EQ(slurp(folder / "w.idx"), expected);
  EXPECT_EQ(slurp(folder / "w.bin"), std::string("\x02\x01\x01\0\x03\0\xdb\xff\0\0\x07\0", 12));
}

TEST(IndexedDatasetWriter, TokenType) {
  EXPECT_EQ(token_dtype(65499), DType::u16);
  EXPECT_EQ(token_dtype(65500), DType::i32);
  const ScratchFolder folder;
  EXPECT_THROW(IndexedDatasetWriter(folder / "w", DType::bf16), InvalidArgument);
}

TEST(IndexedDatasetWriter, UnfinishedLeavesNothing) {
  const ScratchFolder folder;
  spill(folder / "w.idx", "old");
  {
    IndexedDatasetWriter writer(folder / "w", DType::u16);
    writer.add_document(Ids(5000, 3));
    mentions(message_of<DataError>([&] {
               writer.add_document(Ids{1, 65536});
             }),
             {"document 1", "65536", "uint16"});
    EXPECT_THROW(writer.add_document(Ids{-1}), DataError);
    writer.add_sequence(Ids{1});
    EXPECT_THROW(writer.finish(), InvalidArgument);
  }
  EXPECT_EQ(slurp(folder / "w.idx"), "old");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
  EXPECT_THROW(IndexedDatasetWriter(folder / "no/such/w", DType::u16), IoError);
}

TEST(IndexedDatasetWriter, MergeEqualsWritingAtOnce) {
  const ScratchFolder folder;
  IndexedDatasetWriter whole(folder / "whole", DType::i32);
  std::vector<std::string> parts;
  int next = 0;
  for (int part = 0; part < 3; ++part) {
    parts.push_back(folder / ("part" + std::to_string(part)));
    IndexedDatasetWriter writer(parts.back(), DType::i32);
    for (int d = 0; d < part; ++d) {  // the first part is empty
      for (int s = 0; s < 3; ++s) {
        const Ids ids(static_cast<std::size_t>(next % 7), next);
        ++next;
        writer.add_sequence(ids);
        whole.add_sequence(ids);
      }
      writer.end_document();
      whole.end_document();
    }
    writer.finish();
  }
  whole.finish();
  merge_indexed_datasets(parts, folder / "merged");
  EXPECT_EQ(slurp(folder / "merged.idx"), slurp(folder / "whole.idx"));
  EXPECT_EQ(slurp(folder / "merged.bin"), slurp(folder / "whole.bin"));
  IndexedDatasetWriter narrow(folder / "narrow", DType::u16);
  mentions(message_of<DataError>([&] { narrow.append(IndexedDataset(parts[1])); }),
           {"part1.idx", "int32", "uint16"});
}

}  // namespace
}  // namespace tessera
