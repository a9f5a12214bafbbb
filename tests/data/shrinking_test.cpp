/// Files that are cut off while they are in use: an error that says so, never a signal.

#include <fstream>
#include <thread>

#include "data/file.hpp"
#include "raw_files.hpp"
#include "tessera/data/dataset.hpp"
#include "tessera/data/indexed_writer.hpp"
#include "tessera/data/loader.hpp"

namespace tessera {
namespace {

using namespace testing;
using Ids = std::vector<std::int32_t>;
namespace fs = std::filesystem;

std::string write_documents(const ScratchFolder& folder, int documents, std::int32_t length) {
  IndexedDatasetWriter writer(folder / "d", DType::u16);
  for (int d = 0; d < documents; ++d) writer.add_document(Ids(static_cast<std::size_t>(length), d % 100));
  writer.finish();
  return folder / "d";
}

TEST(InputFile, ShrinksOrIsKept) {
  const ScratchFolder folder;
  for (const files::Keep keep : {files::Keep::nothing, files::Keep::small}) {
    spill(folder / "f", "0123456789");
    const files::InputFile file(folder / "f", keep);
    EXPECT_EQ(file.value<char>(7), '7');
    EXPECT_NO_THROW(file.check_unchanged());
    fs::resize_file(folder / "f", 5);
    if (keep == files::Keep::small) {
      EXPECT_EQ(file.value<char>(7), '7') << "a file that is kept stays as it was";
      EXPECT_NO_THROW(file.check_unchanged());
      continue;
    }
    EXPECT_EQ(file.value<char>(4), '4');
    mentions(message_of<DataError>([&] { file.value<char>(7); }), {"/f", "ended at byte 7", "had 10 bytes"});
    mentions(message_of<DataError>([&] { file.check_unchanged(); }), {"/f", "from 10 to 5"});
  }
}

TEST(IndexedDataset, IndexThatIsTooLargeToBeKeptShrinks) {
  const ScratchFolder folder;
  const std::string prefix = write_documents(folder, 3000, 5);
  const auto open = [&](const char* suffix) {
    return std::make_unique<files::InputFile>(prefix + suffix, files::Keep::nothing);
  };
  const IndexedDataset data(prefix, open(".idx"), open(".bin"));
  EXPECT_EQ(data.sequence(2999).size(), 5u);
  EXPECT_EQ(data.lengths().size(), 3000u);
  fs::resize_file(prefix + ".idx", 4096);
  mentions(message_of<DataError>([&] { data.sequence(2999); }), {"d.idx", "ended"});
  mentions(message_of<DataError>([&] { data.lengths(); }), {"d.idx", "ended"});
  mentions(message_of<DataError>([&] { data.document_begin(2999); }), {"d.idx", "ended"});
  mentions(message_of<DataError>([&] { data.check_unchanged(); }), {"d.idx", "changed"});
}

TEST(IntArray, InAFileThatShrinks) {
  const ScratchFolder folder;
  std::string bytes;
  for (std::int32_t i = 0; i < 5000; ++i) put(bytes, 3 * i);
  spill(folder / "a", bytes);
  const auto file = std::make_shared<files::InputFile>(folder / "a", files::Keep::nothing);
  const IntArray array(file, 400, 4900, DType::i32);
  EXPECT_EQ(array[0], 300);
  std::vector<std::int64_t> part(3000);
  array.read(1900, part);
  EXPECT_EQ(part.front(), 6000);
  EXPECT_EQ(part.back(), 14997);
  std::size_t seen = 0;
  array.for_each_piece([&](std::span<const std::byte> piece) { seen += piece.size(); });
  EXPECT_EQ(seen, 4900u * 4);
  EXPECT_THROW(array.read(4900, std::span(part).first(1)), InvalidArgument);
  EXPECT_THROW(IntArray(file, 404, 4900, DType::i32), DataError);
  fs::resize_file(folder / "a", 1000);
  EXPECT_THROW(array[4000], DataError);
}

/// A run's reading thread meets the end of the file.
TEST(DataLoader, TokensThatShrinkWhileTrainingEndTheRun) {
  const ScratchFolder folder;
  const std::string prefix = write_documents(folder, 4000, 64);
  GptDatasetOptions options;
  options.seq_length = 32;
  options.use_cache = false;
  auto files = std::make_shared<IndexedDataset>(prefix);
  auto samples = std::make_shared<GptDataset>(files, ElementRange{0, files->sequences()}, options);
  DataLoader loader(samples, {.global_batch_size = 8, .micro_batch_size = 8, .timeout_s = 60});
  ASSERT_TRUE(loader.next());
  fs::resize_file(prefix + ".idx", 40);  // it was read when the data was opened
  ASSERT_TRUE(loader.next());
  fs::resize_file(prefix + ".bin", 4096);
  mentions(message_of<DataError>([&] {
             while (loader.next()) continue;
           }),
           {"d.bin", "while it was in use", "under a new name"});
}

}  // namespace
}  // namespace tessera
