#include <fstream>

#include "raw_files.hpp"
#include "tessera/data/dataset.hpp"
#include "tessera/data/dataset_tools.hpp"
#include "tessera/data/indexed_writer.hpp"

namespace tessera {
namespace {

using namespace testing;
using Ids = std::vector<std::int32_t>;

/// The older layout, written from its description alone. `documents` empty: fairseq's.
template <typename T>
void write_old(const std::string& prefix, int code, const std::vector<Ids>& sequences,
               const std::vector<std::int64_t>& documents) {
  std::string index("TNTIDX\0\0", 8), tokens;
  for (const std::uint64_t word :
       {std::uint64_t{1}, static_cast<std::uint64_t>(code), std::uint64_t{sizeof(T)},
        std::uint64_t{sequences.size()}, std::uint64_t{sequences.size()}})
    put<std::uint64_t>(index, word);
  if (!documents.empty()) put<std::uint64_t>(index, documents.size());
  for (std::size_t i = 0; i <= sequences.size(); ++i) put<std::uint64_t>(index, i);
  std::uint64_t at = 0;
  put<std::uint64_t>(index, at);
  for (const Ids& ids : sequences) put<std::uint64_t>(index, at += ids.size());
  for (const Ids& ids : sequences) put<std::uint64_t>(index, ids.size());
  for (const std::int64_t entry : documents) put<std::int64_t>(index, entry);
  for (const Ids& ids : sequences) {
    for (const std::int32_t id : ids) put<T>(tokens, static_cast<T>(id));
  }
  spill(prefix + ".idx", index);
  spill(prefix + ".bin", tokens);
}

const std::vector<Ids> kSequences = {{5, 6, 7}, {}, {60000}, {1, 2}, {3, 4, 5, 6}};

TEST(OldIndex, MegatronsAndFairseqs) {
  const ScratchFolder folder;
  write_old<std::uint16_t>(folder / "m", 8, kSequences, {0, 2, 2, 5});
  const IndexedDataset megatron(folder / "m");
  EXPECT_EQ(megatron.format(), IndexFormat::tntidx);
  EXPECT_EQ(megatron.dtype(), DType::u16);
  EXPECT_EQ(megatron.documents(), 3);
  EXPECT_EQ(megatron.document(0), (Ids{5, 6, 7}));
  EXPECT_EQ(megatron.document(1), Ids{});
  EXPECT_EQ(megatron.document(2), (Ids{60000, 1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(megatron.lengths(), (Ids{3, 0, 1, 2, 4}));
  write_old<std::uint32_t>(folder / "f", 9, kSequences, {});
  const IndexedDataset fairseq(folder / "f");
  EXPECT_EQ(fairseq.documents(), 5);
  EXPECT_EQ(fairseq.document_begins(1, 6), (std::vector<std::int64_t>{1, 2, 3, 4, 5}));
  for (std::int64_t i = 0; i < 5; ++i)
    EXPECT_EQ(fairseq.sequence(i), kSequences[static_cast<std::size_t>(i)]);
  write_old<std::int64_t>(folder / "w", 5, {{7}, {1LL << 30}}, {0, 1, 2});
  EXPECT_EQ(IndexedDataset(folder / "w").sequence(1), Ids{1 << 30});
}

TEST(OldIndex, DamageIsNamed) {
  const ScratchFolder folder;
  write_old<std::int32_t>(folder / "d", 4, kSequences, {0, 2, 5});
  const std::string good = slurp(folder / "d.idx");
  const auto with = [&](std::size_t at, std::int64_t value) {
    std::string bytes = good;
    std::memcpy(bytes.data() + at, &value, 8);
    spill(folder / "d.idx", bytes);
    return message_of<DataError>([&] { IndexedDataset(folder / "d"); });
  };
  mentions(with(8, 2), {"byte 8", "version 2"});
  mentions(with(16, 6), {"byte 16", "floats"});
  mentions(with(16, 11), {"byte 16", "11"});
  mentions(with(24, 2), {"byte 24", "int32"});
  mentions(with(32, 1LL << 60), {"byte 32", "cannot be described"});
  mentions(with(40, 6), {"byte 40", "one dimension"});
  mentions(with(48, 1LL << 60), {"byte 48", "document index"});
  mentions(with(48, 4), {"cut off"});
  mentions(with(56 + 16, 3), {"dimension offset 2"});
  mentions(with(56 + 48 + 16, 4), {"sequence 2", "points to token 4", "instead of 3"});
  mentions(with(56 + 48 + 40, 9), {"last sequence ends at token 9 of 10"});
  mentions(with(56 + 96, -1), {"negative length -1"});
  mentions(with(56 + 96, 1LL << 40), {"length 1099511627776"});
  mentions(with(56 + 96 + 40 + 8, 6), {"document entry 1 is 6"});
  for (std::size_t size = 0; size < good.size(); ++size) {
    spill(folder / "d.idx", good.substr(0, size));
    EXPECT_THROW(IndexedDataset(folder / "d"), DataError) << size;
  }
  spill(folder / "d.idx", good + "x");
  mentions(message_of<DataError>([&] { IndexedDataset(folder / "d"); }), {"too long"});
}

TEST(DatasetTools, UpgradeKeepsAllButTheLayout) {
  const ScratchFolder folder;
  write_old<std::uint16_t>(folder / "old", 8, kSequences, {0, 2, 2, 5});
  upgrade_dataset(folder / "old", {.prefix = folder / "new"});
  EXPECT_EQ(slurp(folder / "new.idx"), index_bytes(8, 2, {3, 0, 1, 2, 4}, {0, 2, 2, 5}));
  EXPECT_EQ(slurp(folder / "new.bin"), slurp(folder / "old.bin"));
  mentions(message_of<ConfigError>([&] { upgrade_dataset(folder / "old", {.prefix = folder / "new"}); }),
           {"new.idx", "there already"});
  mentions(message_of<ConfigError>([&] { upgrade_dataset(folder / "new", {.prefix = folder / "n"}); }),
           {"MMIDIDX", "nothing to upgrade"});
  mentions(message_of<ConfigError>([&] {
             upgrade_dataset(folder / "old", {folder / "old", true});
           }),
           {"is what is read"});
  write_old<std::uint32_t>(folder / "f", 9, kSequences, {});
  upgrade_dataset(folder / "f", {.prefix = folder / "g"});
  const IndexedDataset upgraded(folder / "g");
  EXPECT_EQ(upgraded.dtype(), DType::i32);
  EXPECT_EQ(upgraded.documents(), 5);
  EXPECT_EQ(upgraded.document(4), (Ids{3, 4, 5, 6}));
}

TEST(DatasetTools, SplitAndMergeAreInverse) {
  const ScratchFolder folder;
  write_counting(folder / "d", {5, 0, 3, 9, 2, 7, 1});
  write_dataset_record(folder / "d", {.tokenizer = {.vocab_size = 257}, .append_eod = true});
  const IndexedDataset data(folder / "d");
  const auto three = split_dataset(data, parts_of_count(data, 3), {.prefix = folder / "p"});
  ASSERT_EQ(three, (std::vector<std::string>{folder / "p_0", folder / "p_1", folder / "p_2"}));
  EXPECT_EQ(IndexedDataset(three[1]).document(0), data.document(IndexedDataset(three[0]).documents()));
  merge_datasets(three, {.prefix = folder / "m"});
  EXPECT_EQ(slurp(folder / "m.idx"), slurp(folder / "d.idx"));
  EXPECT_EQ(slurp(folder / "m.bin"), slurp(folder / "d.bin"));
  EXPECT_TRUE(read_dataset_record(folder / "m")->append_eod);
  const auto shares = split_dataset(data, parts_of_split(data, "70,0,30"), {.prefix = folder / "s"});
  ASSERT_EQ(shares, (std::vector<std::string>{folder / "s_train", folder / "s_test"}));
  EXPECT_EQ(IndexedDataset(shares[0]).documents(), 5);
  EXPECT_EQ(IndexedDataset(shares[1]).document(1), data.document(6));
  for (const std::int64_t count : {1, 7}) {
    std::int64_t next = 0;
    for (const DatasetPart& part : parts_of_count(data, count)) {
      EXPECT_EQ(part.documents.begin, next);
      EXPECT_GT(part.documents.end, next);
      next = part.documents.end;
    }
    EXPECT_EQ(next, 7);
  }
  EXPECT_THROW(parts_of_count(data, 8), ConfigError);
}

TEST(DatasetTools, MergeRefusesWhatIsNotAlike) {
  const ScratchFolder folder;
  write_counting(folder / "a", {5});
  write_old<std::int32_t>(folder / "b", 4, kSequences, {0, 5});
  const std::vector<std::string> both = {folder / "a", folder / "b"}, one = {folder / "a"};
  mentions(message_of<ConfigError>([&] { merge_datasets(both, {.prefix = folder / "m"}); }),
           {"b", "int32", "uint16"});
  mentions(message_of<ConfigError>([&] { merge_datasets(one, {folder / "a", true}); }), {"is what is read"});
  EXPECT_FALSE(std::filesystem::exists(folder / "m.bin"));
  const std::vector<std::string> names = {folder.path()};
  EXPECT_EQ(datasets_in(names), both);
  const DatasetInfo info = describe_dataset(folder / "b");
  EXPECT_EQ(info.documents, 1);
  EXPECT_EQ(info.longest, 10);
  EXPECT_EQ(info.format, IndexFormat::tntidx);
}

/// Bytes of this process that lie in memory.
std::int64_t resident() {
  std::ifstream in("/proc/self/statm");
  std::int64_t all = 0, pages = 0;
  in >> all >> pages;
  return pages * ::sysconf(_SC_PAGESIZE);
}

TEST(DataLoading, MemoryDiffersAndSamplesDoNot) {
  const ScratchFolder folder;
  constexpr std::int64_t kTokens = 40'000'000, kSequences = 1'600'000;  // 80 MB, an index of 32 MB
  {
    IndexedDatasetWriter writer(folder / "d", DType::u16);
    Ids ids(kTokens / kSequences);
    for (std::int64_t i = 0; i < kSequences; ++i) {
      for (auto& id : ids) id = static_cast<std::int32_t>((i * 7919 + (&id - ids.data())) % 60000);
      writer.add_document(ids);
    }
    writer.finish();
  }
  const std::int64_t index = 34 + 12 * kSequences + 8 * (kSequences + 1), tokens = 2 * kTokens;
  std::vector<std::vector<Ids>> seen;
  for (const auto& [loading, kept] :
       {std::pair{DataLoading::lazy, std::int64_t{0}}, std::pair{DataLoading::mmap, index},
        std::pair{DataLoading::cached, index + tokens}}) {
    const std::int64_t before = resident();
    const IndexedDataset data(folder / "d", {.loading = loading});
    auto& documents = seen.emplace_back();
    for (std::int64_t d = 0; d < kSequences; d += 160'001) documents.push_back(data.document(d));
    EXPECT_EQ(data.kept_bytes(), kept);
    const std::int64_t grown = resident() - before;
    EXPECT_GE(grown, kept * 9 / 10) << name_of(loading);
#ifndef __SANITIZE_ADDRESS__  // it keeps what was freed
    EXPECT_LE(grown, kept + (8 << 20)) << name_of(loading);
#endif
  }
  EXPECT_EQ(seen[0], seen[1]);
  EXPECT_EQ(seen[0], seen[2]);
}

}  // namespace
}  // namespace tessera
