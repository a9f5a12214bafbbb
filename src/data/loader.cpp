#include "tessera/data/loader.hpp"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>

#include "tessera/data/sampler.hpp"

namespace tessera {

Batch batch_for(const Dataset& dataset, std::int64_t count) {
  Batch batch;
  batch.batch = count;
  batch.seq_length = dataset.seq_length();
  const auto samples = static_cast<std::size_t>(count);
  const std::size_t n = samples * static_cast<std::size_t>(batch.seq_length);
  batch.tokens.resize(n);
  batch.labels.resize(n);
  const SampleFields fields = dataset.fields();
  if (fields.position_ids) batch.position_ids.resize(n);
  if (fields.document_ids) batch.document_ids.resize(n);
  if (fields.token_types) batch.token_types.resize(n);
  if (fields.key_end) batch.key_end.resize(samples);
  if (fields.sample_label) batch.sample_labels.resize(samples);
  batch.encoder_seq_length = fields.encoder_length;
  batch.encoder_tokens.resize(samples * static_cast<std::size_t>(fields.encoder_length));
  if (fields.encoder_length > 0) batch.encoder_key_end.resize(samples);
  return batch;
}

void fetch_into(const Dataset& dataset, std::int64_t index, Batch& batch, std::int64_t at) {
  const auto s = static_cast<std::size_t>(batch.seq_length);
  const auto part = [at](std::vector<std::int32_t>& all, std::size_t width) {
    return all.empty() ? std::span<std::int32_t>()
                       : std::span(all).subspan(static_cast<std::size_t>(at) * width, width);
  };
  dataset.fetch(index, {.tokens = part(batch.tokens, s),
                        .labels = part(batch.labels, s),
                        .position_ids = part(batch.position_ids, s),
                        .document_ids = part(batch.document_ids, s),
                        .token_types = part(batch.token_types, s),
                        .key_end = part(batch.key_end, 1),
                        .sample_label = part(batch.sample_labels, 1),
                        .encoder_tokens =
                            part(batch.encoder_tokens, static_cast<std::size_t>(batch.encoder_seq_length)),
                        .encoder_key_end = part(batch.encoder_key_end, 1)});
}

Batch read_samples(const Dataset& dataset, std::span<const std::int64_t> numbers) {
  Batch batch = batch_for(dataset, static_cast<std::int64_t>(numbers.size()));
  for (std::size_t i = 0; i < numbers.size(); ++i)
    fetch_into(dataset, numbers[i], batch, static_cast<std::int64_t>(i));
  return batch;
}

struct DataLoader::State {
  State(std::shared_ptr<const Dataset> data, const DataLoaderOptions& given)
      : dataset(std::move(data)), options(given), consumed(given.consumed_samples) {}

  const std::shared_ptr<const Dataset> dataset;
  const DataLoaderOptions options;
  std::int64_t consumed;  ///< by the caller of next()

  std::mutex mutex;  ///< guards the four below
  std::condition_variable changed;
  std::deque<Batch> ready;
  std::exception_ptr error;
  bool finished = false;
  bool stopping = false;

  std::int64_t local_size() const { return options.global_batch_size / options.data_parallel_size; }
  bool read(Sampler& sampler, std::int64_t begin, Batch& batch);
  bool stop_asked() {
    const std::lock_guard lock(mutex);
    return stopping;
  }
  void run();
};

/// The step whose first sample is `begin`; false when it is not whole or the loader is being stopped.
bool DataLoader::State::read(Sampler& sampler, std::int64_t begin, Batch& batch) {
  if (begin > dataset->size() - options.global_batch_size) return false;
  batch = batch_for(*dataset, local_size());
  batch.sample0 = options.data_parallel_rank * options.micro_batch_size;
  if (options.data_parallel_size > 1) {
    batch.sample_block = options.micro_batch_size;
    batch.sample_stride = options.micro_batch_size * options.data_parallel_size;
  }
  std::vector<std::int64_t> indices;
  for (std::int64_t at = 0; at < batch.batch;) {
    if (!sampler.next(indices)) return false;
    for (const std::int64_t index : indices) {
      if (stop_asked()) return false;
      fetch_into(*dataset, index, batch, at++);
    }
  }
  return true;
}

void DataLoader::State::run() {
  try {
    Sampler sampler({.total_samples = dataset->size(),
                     .consumed_samples = options.consumed_samples,
                     .micro_batch_size = options.micro_batch_size,
                     .data_parallel_rank = options.data_parallel_rank,
                     .data_parallel_size = options.data_parallel_size});
    for (std::int64_t begin = options.consumed_samples;; begin += options.global_batch_size) {
      Batch batch;
      if (!read(sampler, begin, batch)) break;
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return stopping || static_cast<int>(ready.size()) < options.prefetch; });
      if (stopping) break;
      ready.push_back(std::move(batch));
      changed.notify_all();
    }
  } catch (...) {
    const std::lock_guard lock(mutex);
    error = std::current_exception();
  }
  const std::lock_guard lock(mutex);
  finished = true;
  changed.notify_all();
}

DataLoader::DataLoader(std::shared_ptr<const Dataset> dataset, const DataLoaderOptions& options) {
  TESSERA_CHECK(dataset != nullptr, "no dataset to load from");
  TESSERA_CHECK(options.prefetch > 0 && options.timeout_s > 0, "prefetch ", options.prefetch, ", timeout ",
                options.timeout_s, " s");
  TESSERA_CHECK(options.micro_batch_size > 0 && options.data_parallel_size > 0 &&
                    options.global_batch_size > 0 &&
                    options.global_batch_size % (options.micro_batch_size * options.data_parallel_size) == 0,
                "global_batch_size ", options.global_batch_size, " is not a multiple of micro_batch_size ",
                options.micro_batch_size, " x data parallel size ", options.data_parallel_size);
  TESSERA_CHECK(options.data_parallel_rank >= 0 && options.data_parallel_rank < options.data_parallel_size,
                "data_parallel_rank ", options.data_parallel_rank, " of ", options.data_parallel_size);
  TESSERA_CHECK(options.consumed_samples >= 0, "consumed_samples = ", options.consumed_samples);
  state_ = std::make_shared<State>(std::move(dataset), options);
  thread_ = std::thread([state = state_] { state->run(); });
}

DataLoader::~DataLoader() {
  constexpr std::chrono::seconds kPatience{1};  // far more than reading a sample takes
  std::unique_lock lock(state_->mutex);
  state_->stopping = true;
  state_->changed.notify_all();
  const bool ends = state_->changed.wait_for(lock, kPatience, [&] { return state_->finished; });
  lock.unlock();
  // What a thread that hangs in the system touches is its own and shared with nobody who goes.
  ends ? thread_.join() : thread_.detach();
}

std::optional<Batch> DataLoader::next() {
  State& s = *state_;
  std::unique_lock lock(s.mutex);
  const bool came = s.changed.wait_for(lock, std::chrono::duration<double>(s.options.timeout_s),
                                       [&] { return !s.ready.empty() || s.finished; });
  TESSERA_ENSURE(IoError, came, "the data loader got no batch within ", s.options.timeout_s, " s (samples ",
                 s.consumed, " to ", s.consumed + s.options.global_batch_size,
                 "). Is the file system with the data answering?");
  if (s.ready.empty()) {
    if (s.error) std::rethrow_exception(s.error);
    return std::nullopt;
  }
  Batch batch = std::move(s.ready.front());
  s.ready.pop_front();
  s.consumed += s.options.global_batch_size;
  s.changed.notify_all();
  return batch;
}

std::int64_t DataLoader::consumed_samples() const { return state_->consumed; }

}  // namespace tessera
