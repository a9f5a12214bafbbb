#include "tessera/data/indexed_dataset.hpp"

#include <functional>
#include <limits>
#include <random>

#include "raw_files.hpp"
#include "tessera/data/indexed_writer.hpp"

namespace tessera {
namespace {

using namespace testing;

using Ids = std::vector<std::int32_t>;

/// Two documents: sequences of 3 and 2 tokens, then one of 4. Bytes spelled out by hand.
struct Small {
  std::string index = index_bytes(8, 2, {3, 2, 4}, {0, 2, 3});
  std::string tokens;
  Small() {
    for (const int id : {7, 300, 65000, 1, 2, 9, 8, 7, 6})
      put<std::uint16_t>(tokens, static_cast<std::uint16_t>(id));
  }
  std::string write(const ScratchFolder& folder) const {
    spill(folder / "d.idx", index);
    spill(folder / "d.bin", tokens);
    return folder / "d";
  }
};

TEST(IndexedDataset, ReadsHandMadeBytes) {
  const ScratchFolder folder;
  const std::string prefix = Small().write(folder);
  EXPECT_EQ(34 + 3 * 12 + 3 * 8, static_cast<int>(slurp(prefix + ".idx").size()));
  const IndexedDataset data(prefix);
  EXPECT_EQ(data.sequences(), 3);
  EXPECT_EQ(data.documents(), 2);
  EXPECT_EQ(data.tokens(), 9);
  EXPECT_EQ(data.dtype(), DType::u16);
  EXPECT_EQ(data.sequence(0), (Ids{7, 300, 65000}));
  EXPECT_EQ(data.document(0), (Ids{7, 300, 65000, 1, 2}));
  EXPECT_EQ(data.document(1), (Ids{9, 8, 7, 6}));
  Ids piece(2);
  data.read(2, 1, piece);
  EXPECT_EQ(piece, (Ids{8, 7}));
  EXPECT_THROW(data.read(2, 3, piece), InvalidArgument);
  EXPECT_THROW(data.read(2, -1, piece), InvalidArgument);
  EXPECT_THROW(data.read(3, 0, piece), InvalidArgument);
  EXPECT_THROW(data.document(2), InvalidArgument);
  EXPECT_THROW(data.length(-1), InvalidArgument);
  EXPECT_EQ(IndexedDataset(prefix + ".bin").sequences(), 3);
}

TEST(IndexedDataset, AllTokenTypes) {
  const ScratchFolder folder;
  const auto check = [&folder](int code, auto zero, DType dtype) {
    using T = decltype(zero);
    std::string bytes;
    for (const int id : {5, 0, 127, 64}) put<T>(bytes, static_cast<T>(id));
    spill(folder / "t.idx", index_bytes(code, sizeof(T), {4}, {0, 1}));
    spill(folder / "t.bin", bytes);
    const IndexedDataset data(folder / "t");
    EXPECT_EQ(data.dtype(), dtype);
    EXPECT_EQ(data.sequence(0), (Ids{5, 0, 127, 64})) << code;
    EXPECT_EQ(token_code(dtype), code);
    // The library's writer gives the same bytes.
    IndexedDatasetWriter writer(folder / "w", dtype);
    writer.add_document(data.sequence(0));
    writer.finish();
    EXPECT_EQ(slurp(folder / "w.idx"), slurp(folder / "t.idx")) << code;
    EXPECT_EQ(slurp(folder / "w.bin"), bytes) << code;
  };
  check(1, std::uint8_t{}, DType::u8);
  check(2, std::int8_t{}, DType::i8);
  check(3, std::int16_t{}, DType::i16);
  check(4, std::int32_t{}, DType::i32);
  check(5, std::int64_t{}, DType::i64);
  check(6, double{}, DType::f64);
  check(7, float{}, DType::f32);
  check(8, std::uint16_t{}, DType::u16);
}

TEST(IndexedDataset, RefusesIdsThatAreNoTokens) {
  const ScratchFolder folder;
  const auto refused = [&folder](int code, auto bad) {
    using T = decltype(bad);
    std::string bytes;
    put<T>(bytes, T{1});
    put<T>(bytes, bad);
    spill(folder / "t.idx", index_bytes(code, sizeof(T), {2}, {0, 1}));
    spill(folder / "t.bin", bytes);
    const IndexedDataset data(folder / "t");
    mentions(message_of<DataError>([&] { data.sequence(0); }), {"t.bin", "document 0", "position 1"});
  };
  refused(2, std::int8_t{-1});
  refused(4, std::int32_t{-100});
  refused(5, std::int64_t{1} << 31);
  refused(5, std::int64_t{-1});
  refused(6, 0.5);
  refused(6, std::numeric_limits<double>::quiet_NaN());
  refused(7, std::numeric_limits<float>::infinity());
  refused(7, -1.0f);
}

TEST(IndexedDataset, TokenOutsideVocabulary) {
  const ScratchFolder folder;
  const std::string prefix = Small().write(folder);
  const IndexedDataset data(prefix, {.vocab_size = 65000});
  EXPECT_EQ(data.sequence(1), (Ids{1, 2}));
  mentions(message_of<DataError>([&] { data.sequence(0); }),
           {"d.bin", "document 0", "position 2", "65000", "tokenizer"});
  // Positions count from the document's start, through its earlier sequences.
  EXPECT_NO_THROW(IndexedDataset(prefix).check_vocabulary(65001));
  Small second;
  second.tokens[2 * 4 + 1] = '\x7f';
  second.write(folder);
  mentions(message_of<DataError>([&] { IndexedDataset(prefix, {.vocab_size = 20000}).sequence(1); }),
           {"document 0", "position 4"});
  mentions(message_of<DataError>([&] { IndexedDataset(prefix).check_vocabulary(9); }),
           {"document 0", "position 1"});
}

TEST(IndexedDataset, OptionalModes) {
  const ScratchFolder folder;
  Small small;
  small.index += std::string("\x01\x00\x02", 3);
  const IndexedDataset data(small.write(folder));
  EXPECT_TRUE(data.has_modes());
  EXPECT_EQ(data.mode(0), 1);
  EXPECT_EQ(data.mode(2), 2);
  small.index += '\0';
  EXPECT_THROW(IndexedDataset{small.write(folder)}, DataError);
}

TEST(IndexedDataset, EmptyDatasetAndEmptyDocuments) {
  const ScratchFolder folder;
  spill(folder / "e.idx", index_bytes(8, 2, {}, {0}));
  spill(folder / "e.bin", "");
  EXPECT_EQ(IndexedDataset(folder / "e").documents(), 0);
  spill(folder / "e.idx", index_bytes(8, 2, {0, 1, 0}, {0, 0, 2, 2, 3}));
  spill(folder / "e.bin", std::string("\x05\x00", 2));
  const IndexedDataset data(folder / "e", {.vocab_size = 5});
  EXPECT_EQ(data.documents(), 4);
  EXPECT_TRUE(data.document(0).empty());
  EXPECT_TRUE(data.document(3).empty());
  mentions(message_of<DataError>([&] { data.document(1); }), {"document 1", "position 0"});
}

struct Damage {
  const char* name;
  std::function<void(Small&)> apply;
  std::vector<std::string> says;
};

template <typename T>
std::function<void(Small&)> set_at(std::size_t at, T value) {
  return [at, value](Small& small) { std::memcpy(small.index.data() + at, &value, sizeof value); };
}

TEST(IndexedDataset, EveryDamageIsRefusedWithItsPlace) {
  constexpr std::uint64_t kHuge = std::numeric_limits<std::uint64_t>::max();
  const std::size_t pointers = 34 + 12;
  const std::size_t documents = pointers + 24;
  const std::vector<Damage> damages = {
      {"empty idx", [](Small& s) { s.index.clear(); }, {"d.idx", "0 bytes", "cut off"}},
      {"cut header", [](Small& s) { s.index.resize(33); }, {"d.idx", "33 bytes"}},
      {"magic", set_at<char>(3, 'X'), {"d.idx", "byte 0", "MMIDIDX"}},
      {"magic's zeros", set_at<char>(8, 'X'), {"byte 0"}},
      {"version", set_at<std::uint64_t>(9, 2), {"byte 9", "version 2"}},
      {"code 0", set_at<std::uint8_t>(17, 0), {"byte 17", "code 0"}},
      {"code 9", set_at<std::uint8_t>(17, 9), {"byte 17", "code 9"}},
      {"other type", set_at<std::uint8_t>(17, 4), {"points to byte 6", "12"}},
      {"huge count", set_at<std::uint64_t>(18, kHuge), {"byte 18"}},
      {"overflowing count", set_at<std::uint64_t>(18, kHuge / 12 + 2), {"byte 18"}},
      {"huge documents", set_at<std::uint64_t>(26, kHuge), {"byte 26"}},
      {"overflowing documents", set_at<std::uint64_t>(26, (kHuge >> 3) + 1), {"byte 26"}},
      {"more sequences", set_at<std::uint64_t>(18, 4), {"cut off"}},
      {"fewer sequences", set_at<std::uint64_t>(18, 2), {"too long"}},
      {"fewer documents", set_at<std::uint64_t>(26, 2), {"too long"}},
      {"cut end", [](Small& s) { s.index.pop_back(); }, {"d.idx", "cut off"}},
      {"trailing byte", [](Small& s) { s.index += 'x'; }, {"d.idx", "too long"}},
      {"negative length", set_at<std::int32_t>(34, -3), {"byte 34", "negative length -3"}},
      {"longer", set_at<std::int32_t>(34, 4), {"byte 54", "points to byte 6", "8"}},
      {"huge length", set_at<std::int32_t>(42, 0x7fffffff), {"d.bin", "sequence 2"}},
      {"first pointer", set_at<std::int64_t>(pointers, 2), {"byte 46", "points to byte 2"}},
      {"negative pointer", set_at<std::int64_t>(pointers + 8, -6), {"byte 54", "-6"}},
      {"first document", set_at<std::int64_t>(documents, 1), {"byte 70", "entry 0 is 1"}},
      {"falling documents", set_at<std::int64_t>(documents + 8, -1), {"byte 78", "entry 1 is -1"}},
      {"document beyond", set_at<std::int64_t>(documents + 8, 4), {"entry 1 is 4"}},
      {"last document", set_at<std::int64_t>(documents + 16, 2), {"byte 86", "ends at sequence 2"}},
      {"no documents",
       [](Small& s) { s.index = index_bytes(8, 2, {}, {}), s.tokens.clear(); },
       {"byte 26", "empty"}},
      {"cut bin", [](Small& s) { s.tokens.pop_back(); }, {"d.bin", "17 bytes", "cut off"}},
      {"empty bin", [](Small& s) { s.tokens.clear(); }, {"d.bin", "0 bytes"}},
      {"longer bin", [](Small& s) { s.tokens += "xx"; }, {"d.bin", "20 bytes", "too long"}},
  };
  for (const Damage& damage : damages) {
    SCOPED_TRACE(damage.name);
    const ScratchFolder folder;
    Small small;
    damage.apply(small);
    const std::string prefix = small.write(folder);
    const std::string message = message_of<DataError>([&] { IndexedDataset{prefix}; });
    EXPECT_TRUE(mentions(message, damage.says));
    EXPECT_TRUE(mentions(message, {"tessera preprocess"}));
  }
}

TEST(IndexedDataset, MissingFilesAndOddFiles) {
  const ScratchFolder folder;
  mentions(message_of<DataError>([&] { IndexedDataset{folder / "none"}; }),
           {"none.idx", "No such file", "preprocess"});
  const std::string prefix = Small().write(folder);
  std::filesystem::remove(prefix + ".bin");
  mentions(message_of<DataError>([&] { IndexedDataset{prefix}; }), {"d.bin", "No such file"});
  std::filesystem::create_directory(prefix + ".bin");
  mentions(message_of<DataError>([&] { IndexedDataset{prefix}; }), {"d.bin", "not a regular file"});
}

TEST(IndexedDataset, NoticesAFileThatShrinks) {
  const ScratchFolder folder;
  const std::string prefix = Small().write(folder);
  const IndexedDataset data(prefix);
  EXPECT_NO_THROW(data.check_unchanged());
  std::filesystem::resize_file(prefix + ".bin", 4);
  mentions(message_of<DataError>([&] { data.check_unchanged(); }), {"d.bin", "from 18 to 4"});
  mentions(message_of<DataError>([&] { data.sequence(2); }), {"d.bin", "ended"});
}

/// Either refused with DataError, or everything that can be read is consistent. Never a crash.
TEST(IndexedDataset, RandomMutationsNeverCrash) {
  const ScratchFolder folder;
  std::mt19937 random(20240607);
  int refused = 0;
  for (int round = 0; round < 500; ++round) {
    Small small;
    if (round % 3 == 0) small.index += std::string(3, '\0');
    std::string& victim = round % 5 == 4 ? small.tokens : small.index;
    switch (random() % 4) {
      case 0:
        victim[random() % victim.size()] = static_cast<char>(random());
        break;
      case 1:
        victim[random() % victim.size()] ^= static_cast<char>(1 << random() % 8);
        break;
      case 2:
        victim.resize(random() % victim.size());
        break;
      default: {  // a boundary value in one of the wide fields
        const std::uint64_t values[] = {
            0, 1, ~0ull, 1ull << 63, (1ull << 63) - 1, 1ull << 32, (1ull << 61) + 3};
        const std::size_t at = random() % (small.index.size() - 8);
        std::memcpy(small.index.data() + at, &values[random() % 7], 8);
      }
    }
    const std::string prefix = small.write(folder);
    try {
      const IndexedDataset data(prefix);
      std::int64_t tokens = 0;
      for (std::int64_t d = 0; d < data.documents(); ++d) {
        EXPECT_LE(data.document_begin(d), data.document_begin(d + 1));
        tokens += static_cast<std::int64_t>(data.document(d).size());
      }
      EXPECT_EQ(tokens, data.tokens());
      EXPECT_EQ(static_cast<std::size_t>(data.tokens()) * size_of(data.dtype()), small.tokens.size());
    } catch (const DataError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 250);
  EXPECT_LT(refused, 500);
}

}  // namespace
}  // namespace tessera
