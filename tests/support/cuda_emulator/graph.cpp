/// Stream capture and graphs.

#include "graph.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "emulator.hpp"

using namespace tessera_emulator;

namespace tessera_emulator {

cudaError_t Graph::add(const CUstream_st& stream, Node node) {
  std::lock_guard lock(mutex);
  if (broken) return cudaErrorStreamCaptureInvalidated;
  const auto place = std::find(streams.begin(), streams.end(), &stream);
  node.stream = static_cast<std::size_t>(place - streams.begin());
  nodes.push_back(std::move(node));
  return cudaSuccess;
}

bool Graph::is_joined() const {
  for (std::size_t stream = 1; stream < streams.size(); ++stream) {
    std::size_t last = 0;
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      if (nodes[i].stream == stream && nodes[i].kind != Kind::record) last = i;
    }
    const bool awaited = std::any_of(nodes.begin(), nodes.end(), [&](const Node& node) {
      return node.kind == Kind::wait && node.stream == 0 && nodes[node.awaited].stream == stream &&
             node.awaited > last;
    });
    if (!awaited) return false;
  }
  return true;
}

cudaError_t refuse_if_recorded(CUstream_st& stream) {
  const auto graph = stream.recording();
  if (!graph) return cudaSuccess;
  std::lock_guard lock(graph->mutex);
  graph->broken = true;
  return cudaErrorStreamCaptureUnsupported;
}

}  // namespace tessera_emulator

struct CUgraph_st {
  std::shared_ptr<Graph> graph;
};

/// Works on threads of its own, one for each stream of the graph.
struct CUgraphExec_st {
  std::vector<Graph::Node> nodes;
  std::vector<std::unique_ptr<CUstream_st>> workers;
};

namespace {

using State = CUevent_st::State;

CUstream_st::Work completion(const std::shared_ptr<State>& state, std::uint64_t record) {
  return [state, record](cudaError_t so_far) {
    state->complete(record, so_far);
    return cudaSuccess;
  };
}

CUstream_st::Work arrival(const std::shared_ptr<State>& state, std::uint64_t record) {
  return [state, record](cudaError_t) { return state->wait(record); };
}

std::atomic<std::size_t> executables = 0;

/// By device.
std::array<std::atomic<GraphMistake>, 64> mistakes{};

bool has_mistake(const CUstream_st& stream, GraphMistake mistake) {
  return mistakes.at(static_cast<std::size_t>(stream.device())) == mistake;
}

/// The place of the kernel that is left out: one in the middle.
std::size_t left_out(const std::vector<Graph::Node>& nodes) {
  std::size_t place = nodes.size() / 2;
  while (place < nodes.size() && nodes[place].kind != Graph::Kind::work) ++place;
  return place;
}

/// An event that is recorded once.
std::shared_ptr<State> mark(CUstream_st& stream) {
  const auto state = std::make_shared<State>();
  state->recorded = 1;
  stream.enqueue("", true, completion(state, 1));
  return state;
}

/// What a stream does, in its order. Which of two streams was recorded first is no part of a graph: threads
/// of NCCL record beside each other.
struct Step {
  Graph::Kind kind;
  std::string name;
  std::pair<std::size_t, std::size_t> awaited;  ///< stream, and place in what it does
  friend bool operator==(const Step&, const Step&) = default;
};

std::map<std::size_t, std::vector<Step>> steps_of(const std::vector<Graph::Node>& nodes) {
  std::map<std::size_t, std::vector<Step>> streams;
  std::vector<std::pair<std::size_t, std::size_t>> places;
  for (const Graph::Node& node : nodes) {
    std::vector<Step>& steps = streams[node.stream];
    places.emplace_back(node.stream, steps.size());
    const bool waits = node.kind == Graph::Kind::wait;
    steps.push_back({node.kind, node.name, waits ? places[node.awaited] : places.back()});
  }
  return streams;
}

bool same_shape(const std::vector<Graph::Node>& a, const std::vector<Graph::Node>& b) {
  return steps_of(a) == steps_of(b);
}

}  // namespace

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode) {
  if (handle == nullptr) return report(cudaErrorStreamCaptureUnsupported);
  if (handle->recording()) return report(cudaErrorIllegalState);
  const auto graph = std::make_shared<Graph>();
  graph->streams.push_back(handle);
  handle->set_recording(graph);
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* result) {
  *result = nullptr;
  const auto graph = resolve(handle).recording();
  if (!graph) return report(cudaErrorIllegalState);
  std::lock_guard lock(graph->mutex);
  if (graph->streams.front() != handle) return report(cudaErrorStreamCaptureUnmatched);
  for (CUstream_st* const stream : graph->streams) stream->set_recording(nullptr);
  graph->open = false;
  if (graph->broken || has_mistake(*handle, GraphMistake::refused))
    return report(cudaErrorStreamCaptureInvalidated);
  if (!graph->is_joined()) return report(cudaErrorStreamCaptureUnjoined);
  *result = new CUgraph_st{graph};
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = resolve(stream).recording() ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* result, cudaGraph_t graph, unsigned long long) {
  auto made = std::make_unique<CUgraphExec_st>();
  made->nodes = graph->graph->nodes;
  for (const CUstream_st* stream : graph->graph->streams)
    made->workers.push_back(std::make_unique<CUstream_st>(stream->device()));
  *result = made.release();
  ++executables;
  return cudaSuccess;
}

cudaError_t cudaGraphExecUpdate(cudaGraphExec_t executable, cudaGraph_t graph,
                                cudaGraphExecUpdateResultInfo* info) {
  const bool same = same_shape(executable->nodes, graph->graph->nodes);
  info->result = same ? cudaGraphExecUpdateSuccess : cudaGraphExecUpdateErrorTopologyChanged;
  if (!same) return report(cudaErrorGraphExecUpdateFailure);
  executable->nodes = graph->graph->nodes;
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
  CUstream_st& stream = resolve(handle);
  if (const cudaError_t code = refuse_if_recorded(stream); code != cudaSuccess) return report(code);
  note_stream_call();
  const auto begin = mark(stream);
  for (const auto& worker : executable->workers) worker->enqueue("graph", false, arrival(begin, 1));
  std::vector<std::shared_ptr<State>> marks;
  const std::size_t without =
      has_mistake(stream, GraphMistake::incomplete) ? left_out(executable->nodes) : executable->nodes.size();
  for (const Graph::Node& node : executable->nodes) {
    CUstream_st& worker = *executable->workers[node.stream];
    marks.push_back(node.kind == Graph::Kind::record ? mark(worker) : nullptr);
    const bool skipped = marks.size() - 1 == without;
    if (node.kind == Graph::Kind::work && !skipped)
      worker.enqueue(node.name, node.always, node.make ? node.make() : node.work);
    if (node.kind == Graph::Kind::wait) worker.enqueue("graph", false, arrival(marks[node.awaited], 1));
    if (node.kind == Graph::Kind::record_outside)
      worker.enqueue("graph", true, completion(node.event, node.event->next_record()));
    if (node.kind == Graph::Kind::wait_outside)
      worker.enqueue("graph", false, arrival(node.event, node.event->last_record()));
  }
  for (const auto& worker : executable->workers)
    stream.enqueue("cudaGraphLaunch", false, arrival(mark(*worker), 1));
  return report(stream.query() == cudaErrorLaunchFailure ? cudaErrorLaunchFailure : cudaSuccess);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete executable;
  --executables;
  return cudaSuccess;
}

std::size_t tessera_emulator::graph_executables() { return executables; }

void tessera_emulator::plant_graph_mistake(int device, GraphMistake mistake) {
  mistakes.at(static_cast<std::size_t>(device)) = mistake;
}
