#include "tessera/data/loader.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <thread>

#include "raw_files.hpp"
#include "tessera/data/sampler.hpp"

namespace tessera {
namespace {

using namespace testing;

using Ids = std::vector<std::int32_t>;
using Indices = std::vector<std::int64_t>;

/// Sample i is [i, i, ...] with labels i + 1; may fail or dawdle at one sample.
class Numbers final : public Dataset {
 public:
  explicit Numbers(std::int64_t size, std::int64_t bad = -1, int delay_ms = 0)
      : size_(size), bad_(bad), delay_ms_(delay_ms) {}
  std::int64_t size() const override { return size_; }
  std::int64_t seq_length() const override { return 2; }
  SampleFields fields() const override { return {.document_ids = true}; }
  void fetch(std::int64_t index, const SampleView& out) const override {
    ++fetched;
    if (delay_ms_ > 0) std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms_));
    if (index == bad_) throw DataError("sample " + std::to_string(index) + " is damaged");
    for (int i = 0; i < 2; ++i) {
      out.tokens[i] = static_cast<std::int32_t>(index);
      out.labels[i] = static_cast<std::int32_t>(index + 1);
      out.document_ids[i] = i;
    }
    EXPECT_TRUE(out.position_ids.empty());
  }
  mutable std::atomic<int> fetched = 0;

 private:
  std::int64_t size_, bad_;
  int delay_ms_;
};

Indices first_tokens(const Batch& batch) {
  Indices out;
  for (std::int64_t i = 0; i < batch.batch; ++i) out.push_back(batch.tokens[static_cast<std::size_t>(2 * i)]);
  return out;
}

TEST(Sampler, ChunksAndRankSlices) {
  // 11 samples, 3 consumed, micro-batch 2, 2 ranks: chunks 3-6 and 7-10.
  for (const std::int64_t rank : {0, 1}) {
    Sampler sampler({.total_samples = 11,
                     .consumed_samples = 3,
                     .micro_batch_size = 2,
                     .data_parallel_rank = rank,
                     .data_parallel_size = 2});
    Indices indices;
    ASSERT_TRUE(sampler.next(indices));
    EXPECT_EQ(indices, (Indices{3 + 2 * rank, 4 + 2 * rank}));
    ASSERT_TRUE(sampler.next(indices));
    EXPECT_EQ(indices, (Indices{7 + 2 * rank, 8 + 2 * rank}));
    EXPECT_FALSE(sampler.next(indices));
    EXPECT_EQ(sampler.consumed_samples(), 11);
  }
}

TEST(Sampler, LastChunk) {
  SamplerOptions options{
      .total_samples = 7, .micro_batch_size = 2, .data_parallel_rank = 1, .data_parallel_size = 2};
  Indices indices;
  Sampler dropping(options);
  EXPECT_TRUE(dropping.next(indices));
  EXPECT_FALSE(dropping.next(indices));
  options.drop_last = false;
  Sampler keeping(options);
  EXPECT_TRUE(keeping.next(indices));
  EXPECT_TRUE(keeping.next(indices));
  EXPECT_EQ(indices, Indices{6});
  EXPECT_FALSE(keeping.next(indices));
  options.data_parallel_rank = 2;
  EXPECT_THROW(Sampler{options}, InvalidArgument);
  EXPECT_THROW(Sampler({.total_samples = -1}), InvalidArgument);
}

TEST(DataLoader, RanksTogetherReadTheGlobalBatch) {
  auto data = std::make_shared<Numbers>(30);
  for (std::int64_t rank = 0; rank < 3; ++rank) {
    DataLoader loader(data, {.global_batch_size = 12,
                             .micro_batch_size = 2,
                             .data_parallel_rank = rank,
                             .data_parallel_size = 3,
                             .consumed_samples = 1});
    for (int step = 0; step < 2; ++step) {
      const auto batch = loader.next();
      ASSERT_TRUE(batch);
      EXPECT_EQ(batch->batch, 4);
      const std::int64_t base = 1 + 12 * step;
      Indices expected;
      for (const std::int64_t i : {0, 1, 6, 7}) expected.push_back(base + 2 * rank + i);
      EXPECT_EQ(first_tokens(*batch), expected);
      EXPECT_EQ(batch->document_ids, (Ids{0, 1, 0, 1, 0, 1, 0, 1}));
      EXPECT_TRUE(batch->position_ids.empty());
      // Every sample's number in the global batch is its distance from the batch's first sample.
      for (std::int64_t i = 0; i < 4; ++i) EXPECT_EQ(global_sample(*batch, i), expected[i] - base);
      EXPECT_EQ(slice(*batch, 2, 2).sample0, 6 + 2 * rank);
      EXPECT_EQ(loader.consumed_samples(), base + 12);
    }
    EXPECT_FALSE(loader.next());  // 5 of 12 are left
    EXPECT_FALSE(loader.next());
  }
}

TEST(DataLoader, ResumesAnywhereIdentically) {
  auto data = std::make_shared<Numbers>(100);
  const DataLoaderOptions options{.global_batch_size = 6, .micro_batch_size = 3, .prefetch = 3};
  std::vector<Batch> straight;
  DataLoader loader(data, options);
  while (auto batch = loader.next()) straight.push_back(std::move(*batch));
  ASSERT_EQ(straight.size(), 16u);
  for (const std::size_t stop : {0u, 1u, 7u, 15u, 16u}) {
    DataLoader first(data, options);
    for (std::size_t i = 0; i < stop; ++i) first.next();
    DataLoaderOptions resumed = options;
    resumed.consumed_samples = first.consumed_samples();
    EXPECT_EQ(resumed.consumed_samples, static_cast<std::int64_t>(6 * stop));
    DataLoader second(data, resumed);
    for (std::size_t i = stop; i < straight.size(); ++i) {
      const auto batch = second.next();
      ASSERT_TRUE(batch);
      EXPECT_EQ(batch->tokens, straight[i].tokens);
      EXPECT_EQ(batch->labels, straight[i].labels);
    }
    EXPECT_FALSE(second.next());
  }
}

TEST(DataLoader, ErrorsReachTheConsumerAfterTheGoodBatches) {
  auto data = std::make_shared<Numbers>(100, 9);
  DataLoader loader(data, {.global_batch_size = 4, .micro_batch_size = 4, .prefetch = 5});
  EXPECT_TRUE(loader.next());
  EXPECT_TRUE(loader.next());
  for (int i = 0; i < 2; ++i) {
    mentions(message_of<DataError>([&] { loader.next(); }), {"sample 9 is damaged"});
  }
  EXPECT_EQ(loader.consumed_samples(), 8);
}

TEST(DataLoader, ReadsAheadOnlySoFarAndStops) {
  auto data = std::make_shared<Numbers>(1000);
  {
    DataLoader loader(data, {.global_batch_size = 1, .prefetch = 3});
    loader.next();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_LE(data->fetched.load(), 5);  // one taken, three waiting, one in hand
  }
  const DataLoader never_used(std::make_shared<Numbers>(1000), {});
}

TEST(DataLoader, GivesUpOnASourceThatHangs) {
  auto data = std::make_shared<Numbers>(10, -1, 300);
  DataLoader loader(data, {.timeout_s = 0.02});
  mentions(message_of<IoError>([&] { loader.next(); }), {"0.02 s", "samples 0 to 1"});
}

/// A dataset on a disk that is dead from the second sample on, until the test revives it.
class DeadDisk final : public Dataset {
 public:
  explicit DeadDisk(std::shared_future<void> revived) : revived_(std::move(revived)) {}
  std::int64_t size() const override { return 100; }
  std::int64_t seq_length() const override { return 2; }
  void fetch(std::int64_t index, const SampleView& out) const override {
    if (index > 0) revived_.wait();
    std::fill(out.tokens.begin(), out.tokens.end(), static_cast<std::int32_t>(index));
  }

 private:
  std::shared_future<void> revived_;
};

/// The thread that hangs in the system cannot be ended: it is left behind with all that it touches.
TEST(DataLoader, AThreadThatHangsIsLeftBehind) {
  std::promise<void> revive;
  auto data = std::make_shared<DeadDisk>(revive.get_future().share());
  const std::weak_ptr<DeadDisk> alive = data;
  const auto begin = std::chrono::steady_clock::now();
  {
    DataLoader loader(std::move(data), {.timeout_s = 0.2});
    EXPECT_EQ(first_tokens(*loader.next()), Indices{0});
    mentions(message_of<IoError>([&] { loader.next(); }), {"no batch within 0.2 s", "samples 1 to 2"});
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
  EXPECT_FALSE(alive.expired());
  revive.set_value();
  for (int i = 0; i < 3000 && !alive.expired(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_TRUE(alive.expired()) << "the thread did not end when the disk came back";
}

TEST(DataLoader, ImpossibleSizes) {
  auto data = std::make_shared<Numbers>(10);
  EXPECT_THROW(DataLoader(data, {.global_batch_size = 3, .micro_batch_size = 2}), InvalidArgument);
  EXPECT_THROW(DataLoader(data, {.data_parallel_rank = 1}), InvalidArgument);
  EXPECT_THROW(DataLoader(nullptr, {}), InvalidArgument);
  EXPECT_THROW(DataLoader(data, {.consumed_samples = -1}), InvalidArgument);
  DataLoader beyond(data, {.consumed_samples = 500});
  EXPECT_FALSE(beyond.next());
}

}  // namespace
}  // namespace tessera
