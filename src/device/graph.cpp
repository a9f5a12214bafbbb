#include "tessera/device/graph.hpp"

#include <algorithm>
#include <deque>
#include <utility>

#include "device/cuda.hpp"
#include "device/recording.hpp"
#include "tessera/base/error.hpp"
#include "tessera/device/flight.hpp"

namespace tessera {
/// What is known of one key.
struct StreamGraph::Turns {
  std::string key;
  void* executable = nullptr;
  /// Whose graphs may still be running; the last one names the events in the executable.
  std::deque<std::shared_ptr<Recording>> recordings = {};

  /// Waits for what was launched. Whatever that says, the executable goes: NCCL ends no communicator while
  /// one could still launch its calls.
  void forget() noexcept {
    if (executable == nullptr) return;
    try {
      if (!recordings.empty())
        cuda::synchronize_event(recordings.back()->end);  // none if no launch succeeded
    } catch (const std::exception&) {
      // The device has failed, and whoever waits for its work hears of it there.
    }
    cuda::destroy_executable(std::exchange(executable, nullptr));
    recordings.clear();
  }
};

StreamGraph::StreamGraph(std::shared_ptr<Stream> stream) : stream_(std::move(stream)) {}

StreamGraph::~StreamGraph() {
  for (Turns& turns : turns_) turns.forget();
}

void StreamGraph::run(const std::string& key, const std::function<void()>& work, const Options& options) {
  const auto known = std::find_if(turns_.begin(), turns_.end(), [&](const Turns& t) { return t.key == key; });
  const bool first = known == turns_.end();
  if (stream_->native() == nullptr || stream_->trace() || stream_->is_recorded() || first || options.plain) {
    ++stats_.plain;
    work();
    if (first) remember(key);
    return;
  }
  turns_.splice(turns_.begin(), turns_, known);
  const auto recording = std::make_shared<Recording>();
  recording->lasting = options.lasting;
  stream_->make_current();
  cuda::begin_recording(stream_->native());
  stream_->recording_ = recording;
  try {
    work();
    prepare(turns_.front(), finish(*recording));
    if (options.before_launch) options.before_launch();
    launch(turns_.front(), recording);
  } catch (...) {
    abandon(*recording);
    throw;
  }
}

bool StreamGraph::can_replay(const std::string& key) const {
  const auto known = std::find_if(turns_.begin(), turns_.end(), [&](const Turns& t) { return t.key == key; });
  if (known == turns_.end() || known->executable == nullptr || known->recordings.empty() || stream_->trace())
    return false;
  const Recording& recording = *known->recordings.back();
  const bool joined_inside = !recording.joined.empty() && !recording.lasting;
  return !recording.reads_host && recording.named.empty() && !joined_inside;
}

bool StreamGraph::replay(const std::string& key) {
  if (!can_replay(key)) return false;
  const auto known = std::find_if(turns_.begin(), turns_.end(), [&](const Turns& t) { return t.key == key; });
  const FlightSpan flight(*stream_, [] { return FlightOperation{.name = "graph"}; });
  turns_.splice(turns_.begin(), turns_, known);
  stream_->make_current();
  const std::shared_ptr<Recording> recording = again(*turns_.front().recordings.back());
  Event all;
  all.state_->recording = recording;
  try {
    for (const Stream::Relaunched& told : *recording->relaunched) told(all);
    launch(turns_.front(), recording);
  } catch (...) {
    recording->stage = Recording::Stage::abandoned;
    throw;
  }
  ++stats_.replayed;
  return true;
}

/// Another launch of a recorded graph. Its events are its own: those of the launch before are still to tell
/// when that one was over.
std::shared_ptr<Recording> StreamGraph::again(const Recording& recording) {
  auto next = std::make_shared<Recording>();
  next->lasting = recording.lasting;
  next->joined = recording.joined;
  for (Stream* const stream : next->joined) stream->record(next->before.emplace_back());
  next->relaunched = recording.relaunched;
  return next;
}

bool StreamGraph::knows(const std::string& key) const {
  return std::any_of(turns_.begin(), turns_.end(), [&](const Turns& turns) { return turns.key == key; });
}

void StreamGraph::remember(const std::string& key) {
  if (turns_.size() == kMostGraphs) {
    turns_.back().forget();
    turns_.pop_back();
  }
  turns_.push_front({key});
}

/// Ends the recording.
StreamGraph::Owned StreamGraph::finish(Recording& recording) {
  for (Stream* const stream : recording.joined) {
    Event end;
    stream->record(end);
    stream_->wait(end);
  }
  Owned graph(cuda::end_recording(stream_->native()), cuda::destroy_graph);
  leave(recording);
  return graph;
}

/// The streams are as they were, but do not wait for the graph yet.
void StreamGraph::leave(const Recording& recording) {
  stream_->recording_.reset();
  for (Stream* const stream : recording.joined) stream->recording_.reset();
}

void StreamGraph::abandon(Recording& recording) {
  if (stream_->is_recorded()) {
    try {
      const Owned graph(cuda::end_recording(stream_->native()), cuda::destroy_graph);
    } catch (const DeviceError&) {
      // Streams that had joined were not waited for: there is no graph.
    }
    leave(recording);
  }
  recording.stage = Recording::Stage::abandoned;
}

/// Makes the turn's executable one of `graph`.
void StreamGraph::prepare(Turns& turns, const Owned& graph) {
  if (turns.executable != nullptr) {
    const std::string refusal = cuda::update_executable(turns.executable, graph.get());
    if (!refusal.empty()) {
      stats_.refused_update = refusal;
      turns.forget();
    }
  }
  if (turns.executable == nullptr) {
    turns.executable = cuda::make_executable(graph.get());
    ++stats_.made;
  }
}

void StreamGraph::launch(Turns& turns, const std::shared_ptr<Recording>& recording) {
  for (const Event& event : recording->before) stream_->wait(event);
  cuda::record(recording->begin, stream_->native());
  cuda::launch_executable(turns.executable, stream_->native());
  cuda::record(recording->end, stream_->native());
  recording->stage = Recording::Stage::launched;
  for (Stream* const stream : recording->joined) cuda::wait(stream->native(), recording->end);
  while (!turns.recordings.empty() && cuda::done(turns.recordings.front()->end)) turns.recordings.pop_front();
  turns.recordings.push_back(recording);
  ++stats_.launched;
}

}  // namespace tessera
