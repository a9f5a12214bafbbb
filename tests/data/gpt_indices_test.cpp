#include "tessera/data/gpt_indices.hpp"

#include <numeric>
#include <random>

#include "data/file.hpp"
#include "raw_files.hpp"
#include "tessera/base/hash.hpp"
#include "tessera/data/numpy_random.hpp"

namespace tessera {
namespace {

using namespace testing;

using Row = std::vector<std::int64_t>;

Row values(const IntArray& array) {
  Row out;
  for (std::int64_t i = 0; i < array.size(); ++i) out.push_back(array[i]);
  return out;
}

std::vector<std::uint32_t> shuffled(std::uint32_t seed, std::uint32_t n) {
  std::vector<std::uint32_t> a(n);
  std::iota(a.begin(), a.end(), 0u);
  NumpyRandom random(seed);
  random.shuffle(a);
  return a;
}

/// Sum of w * i * (w + i) with i from 1, modulo 2^64: the same formula was evaluated on numpy's permutation.
std::uint64_t fingerprint(const std::vector<std::uint32_t>& a) {
  std::uint64_t sum = 0;
  for (std::uint64_t i = 1; i <= a.size(); ++i) sum += a[i - 1] * i * (a[i - 1] + i);
  return sum;
}

TEST(NumpyRandom, LiteralShuffles) {
  EXPECT_EQ(shuffled(1234, 10), (std::vector<std::uint32_t>{7, 2, 9, 1, 0, 8, 4, 5, 6, 3}));
  EXPECT_EQ(shuffled(0, 10), (std::vector<std::uint32_t>{2, 8, 4, 9, 1, 6, 7, 3, 0, 5}));
  EXPECT_EQ(shuffled(3, 1), std::vector<std::uint32_t>{0});
  EXPECT_TRUE(shuffled(3, 0).empty());
}

/// numpy.random.RandomState(42), one draw after the other.
TEST(NumpyRandom, DrawsAsNumpyDoes) {
  NumpyRandom random(42);
  EXPECT_EQ(random.random(), 0.3745401188473625);
  EXPECT_EQ(random.random(), 0.9507143064099162);
  EXPECT_EQ(random.random(), 0.7319939418114051);
  for (const int expected : {5, 5, 2, 3, 3, 3}) EXPECT_EQ(random.randint(1, 7), expected);
  const std::vector<double> p = {6.0 / 11, 3.0 / 11, 2.0 / 11};
  for (const int expected : {2, 1, 1, 0, 2, 2, 0, 0}) EXPECT_EQ(random.choice(p), expected);
  for (const int expected : {1, 2, 4, 3, 2, 5, 1, 2}) EXPECT_EQ(random.geometric(0.2), expected);
  EXPECT_EQ(random.randint(0, 30522), 25551);
  EXPECT_EQ(random.randint(5, 6), 5);  // draws nothing
  EXPECT_EQ(random.random(), 0.23277134043030423);
  EXPECT_THROW(random.randint(3, 3), InvalidArgument);
  EXPECT_THROW(random.choice({}), InvalidArgument);
  EXPECT_THROW(random.geometric(0.5), InvalidArgument);
}

TEST(NumpyRandom, LargeShufflesEqualNumpys) {
  EXPECT_EQ(fingerprint(shuffled(1234, 997)), 0x4e2a5dc610u);
  EXPECT_EQ(fingerprint(shuffled(42, 100000)), 0xce3b2bf56d67c690u);
  EXPECT_EQ(fingerprint(shuffled(1234, 1000003)), 0x85b6c97492c75472u);
  EXPECT_EQ(fingerprint(shuffled(4294967295u, 1000)), 0x4df1d52f40u);
}

TEST(NumpyRandom, OneStateForSeveralShuffles) {
  NumpyRandom random(7);
  std::vector<std::int32_t> first(50);
  std::iota(first.begin(), first.end(), 0);
  std::vector<std::int64_t> second(20);
  std::iota(second.begin(), second.end(), 0);
  random.shuffle(first);
  random.shuffle(second);
  EXPECT_EQ(first,
            (std::vector<std::int32_t>{13, 15, 22, 42, 30, 27, 1,  20, 10, 36, 32, 46, 34, 18, 17, 35, 29,
                                       41, 9,  2,  33, 16, 21, 31, 38, 24, 5,  12, 45, 6,  37, 40, 11, 0,
                                       7,  48, 43, 26, 49, 8,  44, 14, 28, 39, 23, 19, 3,  25, 4,  47}));
  EXPECT_EQ(second, (std::vector<std::int64_t>{18, 2,  6,  8,  17, 11, 1, 16, 4,  5,
                                               15, 12, 14, 19, 13, 0,  3, 9,  10, 7}));
}

TEST(NumpyRandom, FirstOutputsOfMt19937) {
  NumpyRandom random(5489);  // the generator's published default seed and its 10000th output
  std::uint32_t last = 0;
  EXPECT_EQ(random.next(), 3499211612u);
  for (int i = 1; i < 10000; ++i) last = random.next();
  EXPECT_EQ(last, 4123659995u);
}

struct Golden {
  std::int64_t num_samples;
  Row documents, rows, order;
};

TEST(GptIndices, GoldenTables) {
  const std::vector<std::int32_t> lengths = {5, 7, 3, 10};
  const Row rows1 = {0, 0, 0, 4, 1, 3, 2, 0, 3, 1, 3, 5, 3, 9};
  const Row rows2 = {0, 0, 0, 4, 1, 3, 2, 0, 3, 1, 3, 5, 3, 9, 4, 3, 5, 0, 6, 1, 6, 5, 6, 9, 7, 3};
  const Row rows3 = {0, 0, 1, 1, 1, 5, 2, 2, 3, 3, 4, 2, 5, 1, 5, 5, 6, 2, 6, 6, 7, 0, 7, 4, 7, 8};
  const Golden separate = {8, {0, 1, 2, 3, 1, 2, 3, 0}, rows2, {2, 0, 4, 3, 5, 1, 7, 11, 8, 6, 10, 9}};
  const Golden joint = {10, {2, 1, 2, 0, 0, 1, 3, 3}, rows3, {10, 3, 5, 11, 4, 8, 0, 2, 6, 9, 7, 1}};
  Golden seven = separate;
  seven.num_samples = 7;
  Golden twelve = joint;
  twelve.num_samples = 12;
  for (const Golden& golden :
       {Golden{6, {0, 1, 2, 3}, rows1, {3, 2, 1, 0, 5, 4}}, seven, separate, joint, twelve}) {
    SCOPED_TRACE(golden.num_samples);
    const GptIndexRequest request{.begin = 0, .end = 4, .seq_length = 4, .num_samples = golden.num_samples};
    const GptIndices indices = build_gpt_indices(LengthsView(lengths), request);
    EXPECT_EQ(values(indices.document_index), golden.documents);
    EXPECT_EQ(values(indices.sample_index), golden.rows);
    EXPECT_EQ(values(indices.shuffle_index), golden.order);
    EXPECT_EQ(indices.document_index.dtype(), DType::i32);
    EXPECT_EQ(indices.sample_index.dtype(), DType::i32);
    EXPECT_EQ(indices.shuffle_index.dtype(), DType::u32);
  }
}

/// Walks the documents token by token, as Megatron's loop over remaining lengths does.
Row naive_rows(const std::vector<std::int32_t>& lengths, const Row& documents, std::int64_t s,
               std::int64_t samples) {
  Row rows = {0, 0};
  std::int64_t document = 0, offset = 0;
  for (std::int64_t j = 0; j < samples; ++j) {
    std::int64_t remaining = s + 1;
    while (remaining != 0) {
      const std::int64_t length = lengths[documents[document]] - offset;
      remaining -= length;
      if (remaining <= 0) {
        offset += remaining + length - 1;
        remaining = 0;
      } else if (document + 1 == static_cast<std::int64_t>(documents.size())) {
        offset = lengths[documents[document]] - 1;
        break;
      } else {
        ++document;
        offset = 0;
      }
    }
    rows.push_back(document);
    rows.push_back(offset);
  }
  return rows;
}

TEST(GptIndices, SampleIndexEqualsNaiveWalk) {
  std::mt19937 random(11);
  for (int round = 0; round < 300; ++round) {
    std::vector<std::int32_t> lengths(1 + random() % 40);
    for (auto& length : lengths) length = static_cast<std::int32_t>(random() % (round % 2 ? 5 : 60));
    lengths.front() = 2;
    GptIndexRequest request{.begin = 0, .end = static_cast<std::int64_t>(lengths.size())};
    request.seq_length = 1 + static_cast<std::int64_t>(random() % 17);
    request.seed = random();
    request.keep_partial = round % 3 == 0;
    if (round % 4) request.num_samples = random() % 90;
    const GptIndices indices = build_gpt_indices(LengthsView(lengths), request);
    const Row documents = values(indices.document_index);
    EXPECT_EQ(values(indices.sample_index),
              naive_rows(lengths, documents, request.seq_length, indices.samples()));
    EXPECT_GE(indices.samples(), request.num_samples.value_or(0));
    Row order = values(indices.shuffle_index);
    std::sort(order.begin(), order.end());
    for (std::int64_t i = 0; i < indices.samples(); ++i) ASSERT_EQ(order[i], i);
  }
}

TEST(GptIndices, EpochsAndThreshold) {
  // T = 101, s = 10: 10 samples an epoch; the last epoch is apart below int(0.8 * 10) = 8 of them.
  const auto plan = [](std::int64_t samples) {
    return plan_gpt_indices(101, {.begin = 0, .end = 5, .seq_length = 10, .num_samples = samples});
  };
  EXPECT_EQ(plan(10).epochs, 1);
  EXPECT_EQ(plan(11).epochs, 2);
  EXPECT_TRUE(plan(11).separate_last_epoch);
  EXPECT_EQ(plan(11).first_shuffle, 10);
  EXPECT_TRUE(plan(17).separate_last_epoch);
  EXPECT_FALSE(plan(18).separate_last_epoch);
  EXPECT_EQ(plan(18).first_shuffle, 20);
  EXPECT_EQ(plan(18).samples, 20);
  EXPECT_EQ(plan(0).epochs, 1);
  EXPECT_EQ(plan(1'000'000'000).epochs, 99009901);
}

TEST(GptIndices, ImpossibleRequests) {
  const GptIndexRequest good{.begin = 0, .end = 1, .seq_length = 4, .num_samples = 3};
  GptIndexRequest bad = good;
  bad.seq_length = 0;
  EXPECT_THROW(plan_gpt_indices(10, bad), InvalidArgument);
  bad = good;
  bad.num_samples = std::int64_t{1} << 62;
  EXPECT_THROW(plan_gpt_indices(10, bad), InvalidArgument);
  bad.num_samples = -1;
  EXPECT_THROW(plan_gpt_indices(10, bad), InvalidArgument);
  EXPECT_THROW(plan_gpt_indices(0, good), DataError);
  EXPECT_THROW(count_tokens(LengthsView(), 0, 1), InvalidArgument);
}

class IndexCache : public ::testing::Test {
 protected:
  ScratchFolder folder_;
  std::string cache_ = folder_ / "cache";
  GptIndexRequest request_{.begin = 0, .end = 3, .seq_length = 4, .num_samples = 20};

  CachedGptIndices get() {
    return cached_gpt_indices(IndexedDataset(folder_ / "d"), request_, "train", cache_);
  }
  void SetUp() override { write_counting(folder_ / "d", {7, 5, 11}); }
  std::string file_ending(const std::string& suffix) {
    for (const auto& entry : std::filesystem::directory_iterator(cache_)) {
      if (entry.path().string().ends_with(suffix)) return entry.path().string();
    }
    ADD_FAILURE() << suffix;
    return "";
  }
};

TEST_F(IndexCache, SavedLoadedAndEqual) {
  const auto built = get();
  EXPECT_EQ(built.cache, CacheUse::saved) << built.note;
  const auto loaded = get();
  EXPECT_EQ(loaded.cache, CacheUse::loaded) << loaded.note;
  EXPECT_EQ(values(loaded.indices.document_index), values(built.indices.document_index));
  EXPECT_EQ(values(loaded.indices.sample_index), values(built.indices.sample_index));
  EXPECT_EQ(values(loaded.indices.shuffle_index), values(built.indices.shuffle_index));
  const std::string npy = slurp(file_ending("-GPTDataset-train-sample_index.npy"));
  EXPECT_EQ(npy.substr(0, 8), std::string("\x93NUMPY\x01\0", 8));
  EXPECT_NE(npy.find("{'descr': '<i4', 'fortran_order': False, 'shape': (23, 2), }"), std::string::npos);
  EXPECT_EQ(npy.size(), 128u + 23 * 2 * 4);
  EXPECT_EQ(npy[127], '\n');
}

TEST_F(IndexCache, AnotherRequestOrChangedDataIsBuiltAnew) {
  get();
  request_.seed = 5;
  EXPECT_EQ(get().cache, CacheUse::saved);
  request_.seed = 1234;
  EXPECT_EQ(get().cache, CacheUse::loaded);
  write_counting(folder_ / "d", {5, 7, 11});  // the same sizes in another order
  EXPECT_EQ(get().cache, CacheUse::saved);
}

TEST_F(IndexCache, DamagedFilesAreBuiltAnew) {
  const auto good = get();
  const std::vector<std::string> names = {"description.txt", "document_index.npy", "sample_index.npy",
                                          "shuffle_index.npy"};
  std::mt19937 random(3);
  for (const auto& name : names) {
    for (int round = 0; round < 6; ++round) {
      const std::string path = file_ending(name);
      std::string bytes = slurp(path);
      if (round % 3 == 0) {
        bytes.resize(random() % bytes.size());
      } else {
        bytes[name.ends_with("npy") ? bytes.size() - 1 - random() % 30 : random() % bytes.size()] ^= 1;
      }
      spill(path, bytes);
      const auto again = get();
      EXPECT_EQ(again.cache, CacheUse::saved) << name;
      EXPECT_EQ(values(again.indices.shuffle_index), values(good.indices.shuffle_index));
      EXPECT_EQ(get().cache, CacheUse::loaded) << name;
    }
    std::filesystem::remove(file_ending(name));
    EXPECT_EQ(get().cache, CacheUse::saved) << name;
  }
}

/// With checksums that are right: such a cache was made by somebody, not damaged.
TEST_F(IndexCache, NumbersThatLeadOutOfTheDataAreNeverUsed) {
  EXPECT_EQ(get().note, "") << "a cache that is not there is no reason to warn";
  const auto good = get();
  constexpr std::int32_t kLongest = std::numeric_limits<std::int32_t>::max();
  const struct {
    const char* name;
    std::size_t from_end;  // of the number, in bytes
    std::int32_t value;
    const char* reason;
  } plants[] = {{"document_index", 4, -1, "outside"}, {"document_index", 8, 3, "outside"},
                {"sample_index", 8, 1 << 20, "rise"}, {"sample_index", 8, 0, "rise"},
                {"sample_index", 4, -5, "rise"},      {"sample_index", 4, kLongest, "rise"},
                {"shuffle_index", 4, 22, "outside"},  {"shuffle_index", 20, -1, "outside"}};
  for (const auto& [name, from_end, value, reason] : plants) {
    const std::string path = file_ending(name + std::string(".npy")), list = file_ending("description.txt");
    std::string bytes = slurp(path);
    const auto sum_of = [&] {
      return files::hex(content_hash(std::as_bytes(std::span(bytes)).subspan(128)));
    };
    const std::string before = sum_of();
    std::memcpy(bytes.data() + bytes.size() - from_end, &value, 4);
    std::string description = slurp(list);
    const auto at = description.find(before);
    ASSERT_NE(at, std::string::npos) << name;
    spill(list, description.replace(at, before.size(), sum_of()));
    spill(path, bytes);
    const auto again = get();
    EXPECT_EQ(again.cache, CacheUse::saved) << name;
    EXPECT_NE(again.note.find(reason), std::string::npos) << again.note;
    EXPECT_NE(again.note.find("built anew"), std::string::npos) << again.note;
    EXPECT_EQ(values(again.indices.sample_index), values(good.indices.sample_index));
  }
}

TEST_F(IndexCache, DeepJsonIsDamage) {
  get();
  const std::string path = file_ending("description.txt");
  spill(path, "{\"description\": " + std::string(400'000, '[') + std::string(400'000, ']') + "}");
  const auto again = get();
  EXPECT_EQ(again.cache, CacheUse::saved);
  EXPECT_NE(again.note.find("deep"), std::string::npos) << again.note;
}

TEST_F(IndexCache, FolderThatCannotBeWritten) {
  spill(folder_ / "file", "x");
  cache_ = folder_ / "file/cache";
  const auto built = get();
  EXPECT_EQ(built.cache, CacheUse::unsaved);
  EXPECT_NE(built.note.find("cannot be created"), std::string::npos) << built.note;
  EXPECT_EQ(built.indices.samples(), 22);
  cache_.clear();
  EXPECT_EQ(get().cache, CacheUse::off);
}

}  // namespace
}  // namespace tessera
