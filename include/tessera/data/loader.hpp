#pragma once
/// Reads batches ahead of the training loop in a thread of its own.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <thread>

#include "tessera/data/batch.hpp"
#include "tessera/data/dataset.hpp"

namespace tessera {

/// Arrays for `count` samples of a dataset, to be filled by fetch_into.
Batch batch_for(const Dataset& dataset, std::int64_t count);
/// Sample `index` of the dataset becomes sample `at` of the batch. Errors: as Dataset::fetch.
void fetch_into(const Dataset& dataset, std::int64_t index, Batch& batch, std::int64_t at);
/// Samples `numbers` of a dataset, in that order. Errors: as Dataset::fetch.
Batch read_samples(const Dataset& dataset, std::span<const std::int64_t> numbers);

struct DataLoaderOptions {
  std::int64_t global_batch_size = 1;
  std::int64_t micro_batch_size = 1;
  std::int64_t data_parallel_rank = 0;
  std::int64_t data_parallel_size = 1;
  std::int64_t consumed_samples = 0;  ///< where to begin; the loader's whole state
  int prefetch = 2;                   ///< batches read ahead
  double timeout_s = 600;             ///< next() gives up after so long
};

class DataLoader {
 public:
  /// Starts reading. Errors: InvalidArgument unless global_batch_size is a multiple of micro_batch_size *
  /// data_parallel_size.
  DataLoader(std::shared_ptr<const Dataset> dataset, const DataLoaderOptions& options);
  /// Stops the thread after the sample it is reading. One that hangs there (a file system that does not
  /// answer) is left behind after a second; it shares the dataset and ends by itself should it come back.
  ~DataLoader();
  DataLoader(const DataLoader&) = delete;
  DataLoader& operator=(const DataLoader&) = delete;

  /// This rank's part of the next step's global batch: its micro-batches in order, sample0, sample_block and
  /// sample_stride set so that slice() of a micro-batch has the right sample numbers. None when less than a
  /// global batch is left. Errors: whatever reading threw; IoError when nothing came within timeout_s.
  std::optional<Batch> next();
  /// Samples of all batches next() has returned, over all ranks: pass it as consumed_samples to go on from
  /// here.
  std::int64_t consumed_samples() const;

 private:
  struct State;
  std::shared_ptr<State> state_;  ///< shared with the thread
  std::thread thread_;
};

}  // namespace tessera
