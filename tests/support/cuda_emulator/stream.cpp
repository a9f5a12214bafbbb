/// Streams, events and what is put on them.

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>

#include "graph.hpp"
#include "runtime.hpp"
#include "tessera/base/clock.hpp"

namespace tessera_emulator {
namespace {

/// Every stream there is; the default ones are made at first use and live as long as the process. Who waits
/// for a stream owns it meanwhile, as another thread may destroy it.
struct Streams {
  std::mutex mutex;
  std::map<CUstream_st*, std::shared_ptr<CUstream_st>> all;
  std::map<int, CUstream_st*> defaults;
};
Streams& streams() {
  static Streams* const instance = new Streams;  // streams may be used while the process ends
  return *instance;
}

}  // namespace

std::uint64_t HardwareQueue::add() {
  const std::lock_guard lock(mutex_);
  waiting_.insert(next_);
  return next_++;
}

void HardwareQueue::await_turn(std::uint64_t ticket) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return *waiting_.begin() == ticket; });
}

void HardwareQueue::begin(std::uint64_t ticket) {
  const std::lock_guard lock(mutex_);
  waiting_.erase(ticket);
  changed_.notify_all();
}

namespace {

int connections_from_environment() {
  constexpr int kRanks = 8, kOfProcess = 32;  // tests' ranks are threads that share a device, not processes
  const char* text = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  return text == nullptr ? kRanks * kOfProcess : std::max(1, std::atoi(text));
}
std::atomic<int> connections = connections_from_environment();

}  // namespace

void set_connections(int count) { connections = count; }

std::shared_ptr<HardwareQueue> queue_for_stream(int device) {
  static std::mutex mutex;
  static auto* const of_devices = new std::map<int, std::vector<std::shared_ptr<HardwareQueue>>>;
  const std::lock_guard lock(mutex);
  auto& queues = (*of_devices)[device];
  const auto count = static_cast<std::size_t>(connections);
  while (queues.size() < count) queues.push_back(std::make_shared<HardwareQueue>());
  return *std::min_element(queues.begin(), queues.begin() + connections,
                           [](const auto& a, const auto& b) { return a.use_count() < b.use_count(); });
}

CUstream_st& resolve(cudaStream_t stream) {
  if (stream != nullptr) return *stream;
  Streams& known = streams();
  std::lock_guard lock(known.mutex);
  CUstream_st*& slot = known.defaults[current_device()];
  if (slot == nullptr) {
    slot = new CUstream_st(current_device(), queue_for_stream(current_device()));
    known.all.emplace(slot, slot);
  }
  return *slot;
}

namespace {

std::vector<std::shared_ptr<CUstream_st>> streams_of(int device) {
  std::vector<std::shared_ptr<CUstream_st>> found;
  const std::lock_guard lock(streams().mutex);
  for (const auto& [handle, stream] : streams().all) {
    if (stream->device() == device) found.push_back(stream);
  }
  return found;
}

}  // namespace

void drain(int device) {
  for (const auto& stream : streams_of(device)) stream->synchronize();
}

cudaError_t synchronize_device(int device) {
  cudaError_t first = cudaSuccess;
  for (const auto& stream : streams_of(device)) {
    cudaError_t code = refuse_if_recorded(*stream);
    if (code == cudaSuccess) code = stream->synchronize();
    if (first == cudaSuccess) first = code;
  }
  return first;
}

static CUstream_st::Work worked(std::function<void()> work) {
  return [work = std::move(work)](cudaError_t) {
    const memory::Access access;
    work();
    return cudaSuccess;
  };
}

cudaError_t enqueue(cudaStream_t handle, const char* name, std::function<void()> work) {
  note_stream_call();
  CUstream_st& stream = resolve(handle);
  return report(stream.enqueue(name, false, worked(std::move(work))));
}

cudaError_t record(cudaStream_t handle, const char* name, std::function<std::function<void()>()> make) {
  note_stream_call();
  CUstream_st& stream = resolve(handle);
  return report(stream.recording()->add(
      stream, {.name = name, .make = [make = std::move(make)] { return worked(make()); }}));
}

}  // namespace tessera_emulator

using namespace tessera_emulator;

CUstream_st::CUstream_st(int device, std::shared_ptr<HardwareQueue> queue)
    : device_(device), queue_(std::move(queue)), thread_([this] { work(); }) {}

CUstream_st::~CUstream_st() {
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

cudaError_t CUstream_st::enqueue(std::string name, bool always, Work work, bool waits) {
  if (const auto graph = recording())
    return graph->add(*this, {.name = std::move(name), .always = always, .work = std::move(work)});
  std::lock_guard lock(mutex_);
  if (error_ != cudaSuccess && !always) return error_;
  items_.push_back({std::move(name), always, std::move(work), waits, queue_ ? queue_->add() : 0});
  changed_.notify_all();
  return error_;
}

cudaError_t CUstream_st::synchronize() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return items_.empty() && !busy_; });
  return error_;
}

cudaError_t CUstream_st::query() {
  std::lock_guard lock(mutex_);
  if (error_ != cudaSuccess) return error_;
  return items_.empty() && !busy_ ? cudaSuccess : cudaErrorNotReady;
}

std::shared_ptr<Graph> CUstream_st::recording() {
  std::lock_guard lock(mutex_);
  return recording_;
}

void CUstream_st::set_recording(std::shared_ptr<Graph> graph) {
  std::lock_guard lock(mutex_);
  recording_ = std::move(graph);
}

void CUstream_st::work() {
  cudaSetDevice(device_);
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !items_.empty() || ending_; });
    if (items_.empty()) return;
    Item item = std::move(items_.front());
    items_.pop_front();
    busy_ = true;
    const cudaError_t so_far = error_;
    lock.unlock();
    if (queue_) queue_->await_turn(item.ticket);
    if (queue_ && !item.waits) queue_->begin(item.ticket);
    const cudaError_t code = perform(item, so_far);
    if (queue_ && item.waits) queue_->begin(item.ticket);
    item = {};  // what the work holds is given up before anyone is told that it is done
    lock.lock();
    if (error_ == cudaSuccess) error_ = code;
    busy_ = false;
    changed_.notify_all();
  }
}

cudaError_t CUstream_st::perform(const Item& item, cudaError_t so_far) {
  if (so_far != cudaSuccess && !item.always) return so_far;
  try {
    return item.work(so_far);
  } catch (const std::exception& error) {
    note_failure(item.name.empty() ? error.what() : item.name + ": " + error.what());
  } catch (...) {
    note_failure(item.name + ": an exception of an unknown type");
  }
  return cudaErrorLaunchFailure;
}

std::uint64_t CUevent_st::State::next_record() {
  std::lock_guard lock(mutex);
  captured = false;
  return ++recorded;
}

std::uint64_t CUevent_st::State::last_record() {
  std::lock_guard lock(mutex);
  return recorded;
}

void CUevent_st::State::complete(std::uint64_t record, cudaError_t so_far) {
  std::lock_guard lock(mutex);
  if (record > completed) {
    completed = record;
    error = so_far;
    seconds = tessera::now_s();
  }
  changed.notify_all();
}

cudaError_t CUevent_st::State::wait(std::uint64_t record) {
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return completed >= record; });
  return error;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  if (device_count() == 0) return report(cudaErrorNoDevice);
  *stream = new CUstream_st(current_device(), queue_for_stream(current_device()));
  std::lock_guard lock(streams().mutex);
  streams().all.emplace(*stream, *stream);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  if (stream == nullptr) return report(cudaErrorInvalidResourceHandle);
  std::shared_ptr<CUstream_st> last;  // destroyed without the lock
  std::lock_guard lock(streams().mutex);
  const auto known = streams().all.find(stream);
  if (known == streams().all.end()) return report(cudaErrorInvalidResourceHandle);
  last = std::move(known->second);
  streams().all.erase(known);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  note_slow_call();
  const cudaError_t refused = refuse_if_recorded(resolve(stream));
  return report(refused != cudaSuccess ? refused : resolve(stream).synchronize());
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (const cudaError_t refused = refuse_if_recorded(resolve(stream)); refused != cudaSuccess)
    return report(refused);
  const cudaError_t code = resolve(stream).query();
  return code == cudaErrorNotReady ? code : report(code);
}
cudaError_t cudaDeviceSynchronize() { return report(synchronize_device(current_device())); }

namespace {

/// A wait for an event of the graph being recorded, which `stream` joins if it has not.
cudaError_t wait_in_graph(CUstream_st& stream, const std::shared_ptr<Graph>& graph, std::size_t node) {
  const auto own = stream.recording();
  if (own && own != graph) return cudaErrorStreamCaptureIsolation;
  if (!own) {
    std::lock_guard lock(graph->mutex);
    graph->streams.push_back(&stream);
    stream.set_recording(graph);
  }
  return graph->add(stream, {.kind = Graph::Kind::wait, .awaited = node});
}

}  // namespace

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags) {
  if (event == nullptr) return report(cudaErrorInvalidResourceHandle);
  note_stream_call();
  CUstream_st& stream = resolve(handle);
  const auto own = stream.recording();
  if (flags == cudaEventWaitExternal) {
    if (!own) return report(cudaErrorInvalidValue);
    return report(own->add(stream, {.kind = Graph::Kind::wait_outside, .event = event->state}));
  }
  std::shared_ptr<Graph> graph;
  std::size_t node = 0;
  std::uint64_t record = 0;
  {
    std::lock_guard lock(event->state->mutex);
    record = event->state->recorded;
    if (event->state->captured) {
      graph = event->state->graph.lock();
      node = event->state->node;
      if (!graph || !graph->open) return report(cudaErrorCapturedEvent);
    }
  }
  if (graph) return report(wait_in_graph(stream, graph, node));
  if (own) {
    refuse_if_recorded(stream);
    return report(cudaErrorStreamCaptureIsolation);
  }
  return report(stream.enqueue(
      "cudaStreamWaitEvent", false,
      [state = event->state, record](cudaError_t) { return state->wait(record); }, true));
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  if (event == nullptr) return report(cudaErrorInvalidResourceHandle);
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle, unsigned flags) {
  if (event == nullptr) return report(cudaErrorInvalidResourceHandle);
  note_stream_call();
  CUstream_st& stream = resolve(handle);
  const auto graph = stream.recording();
  if (flags == cudaEventRecordExternal) {
    if (!graph) return report(cudaErrorInvalidValue);
    return report(graph->add(stream, {.kind = Graph::Kind::record_outside, .event = event->state}));
  }
  if (graph) {
    const cudaError_t code = graph->add(stream, {.kind = Graph::Kind::record});
    std::lock_guard lock(event->state->mutex);
    event->state->captured = true;
    event->state->graph = graph;
    event->state->node = graph->nodes.size() - 1;
    return report(code);
  }
  const std::uint64_t record = event->state->next_record();
  return report(stream.enqueue("cudaEventRecord", true, [state = event->state, record](cudaError_t so_far) {
    state->complete(record, so_far);
    return cudaSuccess;
  }));
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (event == nullptr) return report(cudaErrorInvalidResourceHandle);
  std::lock_guard lock(event->state->mutex);
  if (event->state->captured) return report(cudaErrorCapturedEvent);
  if (event->state->completed < event->state->recorded) return cudaErrorNotReady;
  return report(event->state->error);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  note_slow_call();
  if (event == nullptr) return report(cudaErrorInvalidResourceHandle);
  std::uint64_t record = 0;
  {
    std::lock_guard lock(event->state->mutex);
    if (event->state->captured) return report(cudaErrorCapturedEvent);
    record = event->state->recorded;
  }
  return report(event->state->wait(record));
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  if (begin == nullptr || end == nullptr) return report(cudaErrorInvalidResourceHandle);
  double seconds = 0;
  for (const cudaEvent_t event : {begin, end}) {
    std::lock_guard lock(event->state->mutex);
    if (event->state->recorded == 0) return report(cudaErrorInvalidResourceHandle);
    if (event->state->completed < event->state->recorded) return cudaErrorNotReady;
    seconds = event->state->seconds - seconds;
  }
  *milliseconds = static_cast<float>(seconds * 1e3);
  return cudaSuccess;
}
