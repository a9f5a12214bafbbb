/// The one file that knows cuDNN. A graph is planned once per shape, and the kMostGraphs used last are kept;
/// a handle is kept per stream. Both are memos of the process, made at first use; what is left at the end is
/// never freed, since the CUDA runtime may be gone by then.
///
/// Backward is cuDNN's deterministic algorithm, unless a shape allows the other. On Hopper it writes the
/// matrix dP (batch x heads x seq_q x seq_k, 2 bytes an element) to memory and multiplies that once more for
/// dQ, where the other algorithm adds dQ up with atomics; NVIDIA documents the memory, not the time. So that
/// memory stays bounded, a call is cut into pieces of at most kMostScoreBytes.

#include "kernels/cuda/attention_cudnn.hpp"

#include <cuda_runtime.h>
#define CUDNN_FRONTEND_SKIP_JSON_LIB  // graphs are not written to files
#include <cudnn_frontend.h>

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernels/cuda/recent.hpp"
#include "tessera/base/error.hpp"

namespace tessera::kernels::cuda {
namespace {

namespace fe = cudnn_frontend;

constexpr std::int64_t kMostScoreBytes = std::int64_t{1} << 30;
/// Training needs two or three; prompts of every length make ever new ones, some megabytes each.
constexpr std::size_t kMostGraphs = 64;

enum Operand : std::int64_t { kQ = 1, kK, kV, kO, kStats, kGradO, kGradQ, kGradK, kGradV };

void check_runtime(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  cudaGetLastError();  // the runtime keeps the last error until it is read
  throw DeviceError(tessera::detail::concat(call, " failed: ", cudaGetErrorString(code), " (",
                                            cudaGetErrorName(code), ")"));
}

void check_cudnn(cudnnStatus_t status, const char* call) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  throw DeviceError(tessera::detail::concat(call, " failed: ", cudnnGetErrorString(status)));
}

int current_device() {
  int device = 0;
  check_runtime(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

std::size_t rounded(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

using TensorPtr = std::shared_ptr<fe::graph::Tensor_attributes>;

fe::graph::Tensor_attributes described(Operand operand, const char* name, std::int64_t batch,
                                       std::int64_t heads, std::int64_t seq, std::int64_t head_dim,
                                       const HeadStrides& stride) {
  return fe::graph::Tensor_attributes()
      .set_name(name)
      .set_uid(operand)
      .set_dim({batch, heads, seq, head_dim})
      .set_stride({stride.batch, stride.head, stride.seq, 1});
}

/// Log-sum-exps, [batch, heads, seq_q] packed: natural logarithms, as ours.
fe::graph::Tensor_attributes described_stats(const AttentionShape& s) {
  return fe::graph::Tensor_attributes()
      .set_name("stats")
      .set_uid(kStats)
      .set_dim({s.batch, s.heads, s.seq_q, 1})
      .set_stride({s.heads * s.seq_q, s.seq_q, 1, 1})
      .set_data_type(fe::DataType_t::FLOAT);
}

void set_output(const TensorPtr& tensor, const fe::graph::Tensor_attributes& description) {
  tensor->set_output(true)
      .set_uid(description.get_uid())
      .set_dim(description.get_dim())
      .set_stride(description.get_stride());
}

struct Descriptions {
  fe::graph::Tensor_attributes q, k, v, o;
};

Descriptions describe_operands(const AttentionShape& s) {
  return {described(kQ, "q", s.batch, s.heads, s.seq_q, s.head_dim, s.q_stride),
          described(kK, "k", s.batch, s.kv_heads, s.seq_k, s.head_dim, s.k_stride),
          described(kV, "v", s.batch, s.kv_heads, s.seq_k, s.head_dim, s.v_stride),
          described(kO, "o", s.batch, s.heads, s.seq_q, s.head_dim, s.o_stride)};
}

std::unique_ptr<fe::graph::Graph> empty_graph(const AttentionShape& s) {
  auto graph = std::make_unique<fe::graph::Graph>();
  graph->set_io_data_type(s.dtype == DType::bf16 ? fe::DataType_t::BFLOAT16 : fe::DataType_t::HALF)
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);
  return graph;
}

template <typename Options>
void set_mask(Options& options, const AttentionShape& s) {
  if (s.causal) {
    // Queries with an offset end with the last key.
    const auto corner =
        s.query_offset != 0 ? fe::DiagonalAlignment_t::BOTTOM_RIGHT : fe::DiagonalAlignment_t::TOP_LEFT;
    options.set_diagonal_alignment(corner).set_diagonal_band_right_bound(0);
  }
  // Kept are columns + bound > rows: our window.
  if (s.window > 0) options.set_diagonal_band_left_bound(static_cast<int>(s.window));
}

std::unique_ptr<fe::graph::Graph> forward_graph(const AttentionShape& s) {
  auto graph = empty_graph(s);
  const Descriptions d = describe_operands(s);
  auto options =
      fe::graph::SDPA_attributes().set_name("forward").set_generate_stats(true).set_attn_scale(s.scale);
  set_mask(options, s);
  auto [o, stats] = graph->sdpa(graph->tensor(d.q), graph->tensor(d.k), graph->tensor(d.v), options);
  set_output(o, d.o);
  set_output(stats, described_stats(s));
  stats->set_data_type(fe::DataType_t::FLOAT);
  return graph;
}

std::unique_ptr<fe::graph::Graph> backward_graph(const AttentionShape& s) {
  auto graph = empty_graph(s);
  const Descriptions d = describe_operands(s);
  auto options = fe::graph::SDPA_backward_attributes()
                     .set_name("backward")
                     .set_attn_scale(s.scale)
                     .set_deterministic_algorithm(s.deterministic);
  set_mask(options, s);
  auto grad_o = d.o;
  grad_o.set_name("grad_o").set_uid(kGradO);
  auto [dq, dk, dv] =
      graph->sdpa_backward(graph->tensor(d.q), graph->tensor(d.k), graph->tensor(d.v), graph->tensor(d.o),
                           graph->tensor(grad_o), graph->tensor(described_stats(s)), options);
  set_output(dq, d.q);
  set_output(dk, d.k);
  set_output(dv, d.v);
  dq->set_uid(kGradQ);
  dk->set_uid(kGradK);
  dv->set_uid(kGradV);
  return graph;
}

/// A graph with its plan, or why cuDNN has none. One thread executes at a time.
struct Planned {
  std::mutex mutex;
  bool made = false;
  std::unique_ptr<fe::graph::Graph> graph;  ///< null if cuDNN refused
  std::size_t workspace = 0;
  std::string refusal;
  int tries = 0;
  bool may_pass = false;                         ///< the refusal: it was not about the shape
  bool captured = false;                         ///< a CUDA graph runs its kernels: it stays for ever
  std::map<cudaStream_t, cudaEvent_t> last_use;  ///< per stream

  Planned() = default;
  Planned(const Planned&) = delete;
  Planned& operator=(const Planned&) = delete;
  ~Planned() {
    for (const auto& [stream, event] : last_use) cudaEventDestroy(event);
  }

  /// After a launch on `stream`.
  void mark_use(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check_runtime(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
    captured = captured || status != cudaStreamCaptureStatusNone;
    if (captured) return;
    cudaEvent_t& event = last_use[stream];
    if (event == nullptr) {
      check_runtime(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    }
    check_runtime(cudaEventRecord(event, stream), "cudaEventRecord");
  }
  /// Whether the GPU is done with its kernels, whose code goes with the plan.
  bool idle() const {
    for (const auto& [stream, event] : last_use) {
      if (cudaEventQuery(event) == cudaSuccess) continue;
      cudaGetLastError();  // "not ready" would be taken for an error of the next call
      return false;
    }
    return true;
  }
};

struct StreamHandle {
  std::mutex mutex;
  cudnnHandle_t handle = nullptr;
};

using Key = std::array<std::int64_t, 24>;

struct ProcessState {
  std::mutex mutex;
  Recent<Key, std::shared_ptr<Planned>> graphs{kMostGraphs};
  std::vector<std::shared_ptr<Planned>> retired;  ///< no longer kept, but perhaps still running
  std::map<std::pair<int, cudaStream_t>, std::shared_ptr<StreamHandle>> handles;
};

ProcessState& process() {
  static ProcessState* const state = new ProcessState;
  return *state;
}

Key key_of(const AttentionShape& s, bool backward, int device) {
  std::int64_t scale = 0;
  static_assert(sizeof s.scale <= sizeof scale);
  __builtin_memcpy(&scale, &s.scale, sizeof s.scale);
  const std::int64_t causal = !s.causal ? 0 : s.query_offset == 0 ? 1 : 2;  // and where its diagonal ends
  return {backward,         device,
          s.batch,          s.seq_q,
          s.seq_k,          s.heads,
          s.kv_heads,       s.head_dim,
          causal,           scale,
          s.q_stride.seq,   s.q_stride.batch,
          s.q_stride.head,  s.k_stride.seq,
          s.k_stride.batch, s.k_stride.head,
          s.v_stride.seq,   s.v_stride.batch,
          s.v_stride.head,  s.o_stride.seq,
          s.o_stride.batch, s.o_stride.head * 256 + static_cast<std::int64_t>(s.dtype),
          s.deterministic,  s.window};
}

std::shared_ptr<StreamHandle> handle_of(int device, cudaStream_t stream) {
  ProcessState& all = process();
  const std::lock_guard lock(all.mutex);
  std::shared_ptr<StreamHandle>& slot = all.handles[{device, stream}];
  if (slot == nullptr) {
    auto made = std::make_shared<StreamHandle>();
    check_cudnn(cudnnCreate(&made->handle), "cudnnCreate");
    slot = std::move(made);
  }
  return slot;
}

/// How often a refusal that may pass is asked for again.
constexpr int kMostTries = 4;

/// By value: an error gives its code only to who may change it.
bool may_pass(fe::error_t error) {
  const auto code = error.get_code();
  return code == fe::error_code_t::CUDA_API_FAILED || code == fe::error_code_t::CUDNN_BACKEND_API_FAILED ||
         code == fe::error_code_t::HANDLE_ERROR;
}

/// Lets cuDNN plan the graph; what it answers otherwise is kept in `refusal`.
void plan(Planned& planned, const AttentionShape& s, bool backward, int device) {
  planned.made = true;
  ++planned.tries;
  const auto handle = handle_of(device, nullptr);
  const std::lock_guard lock(handle->mutex);
  auto graph = backward ? backward_graph(s) : forward_graph(s);
  auto built = graph->build(handle->handle, {fe::HeurMode_t::A});
  std::int64_t bytes = 0;
  auto sized = built.is_good() ? graph->get_workspace_size(bytes) : built;
  if (!sized.is_good()) {
    planned.refusal =
        tessera::detail::concat("cuDNN ", cudnnGetVersion(), " has no plan for it: ", sized.get_message());
    planned.may_pass = may_pass(sized);
    return;
  }
  planned.workspace = static_cast<std::size_t>(bytes);
  planned.graph = std::move(graph);
}

/// Takes the graphs that were not used for longest out of the memo, and frees those that no thread and no
/// stream uses any more. Does not wait.
void forget_some(ProcessState& all) {
  const auto may_go = [](const std::shared_ptr<Planned>& planned) {
    if (planned.use_count() > 1) return false;  // a thread is about to run it
    return !planned->captured;
  };
  for (auto& planned : all.graphs.shrink(may_go)) all.retired.push_back(std::move(planned));
  std::erase_if(all.retired, [](const std::shared_ptr<Planned>& planned) { return planned->idle(); });
}

std::shared_ptr<Planned> planned_for(const AttentionShape& s, bool backward, bool retry = false) {
  const int device = current_device();
  std::shared_ptr<Planned> planned;
  {
    ProcessState& all = process();
    const std::lock_guard lock(all.mutex);
    std::shared_ptr<Planned>& slot = all.graphs.touch(key_of(s, backward, device));
    const bool fresh = slot == nullptr;
    if (fresh) slot = std::make_shared<Planned>();
    planned = slot;
    if (fresh) forget_some(all);
  }
  const std::lock_guard lock(planned->mutex);
  const bool again = retry && planned->graph == nullptr && planned->may_pass && planned->tries < kMostTries;
  if (!planned->made || again) plan(*planned, s, backward, device);
  return planned;
}

/// As planned_for. Errors: DeviceError with cuDNN's reason if it has no plan.
std::shared_ptr<Planned> usable(const AttentionShape& s, bool backward) {
  auto planned = planned_for(s, backward);
  TESSERA_ENSURE(DeviceError, planned->graph != nullptr, backward ? "backward of an " : "an ",
                 describe_attention(s), ": ", planned->refusal);
  return planned;
}

using Pointers = std::unordered_map<std::int64_t, void*>;

void execute(const AttentionShape& s, bool backward, Pointers& pointers, void* workspace,
             const Launch& launch) {
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  const auto planned = usable(s, backward);
  const auto handle = handle_of(current_device(), stream);
  const std::scoped_lock lock(planned->mutex, handle->mutex);
  check_cudnn(cudnnSetStream(handle->handle, stream), "cudnnSetStream");
  auto result = planned->graph->execute(handle->handle, pointers, workspace);
  TESSERA_ENSURE(DeviceError, result.is_good(), "cuDNN failed to run ", backward ? "backward" : "forward",
                 " of an ", describe_attention(s), ": ", result.get_message());
  planned->mark_use(stream);
}

void check_memory(std::initializer_list<const void*> operands) {
  for (const void* p : operands) {
    TESSERA_CHECK(p != nullptr && reinterpret_cast<std::uintptr_t>(p) % 16 == 0,
                  "cuDNN's attention needs operands that start at multiples of 16 bytes");
  }
}

/// The shape of one piece of backward: all of it where there is no matrix dP.
AttentionShape piece_of(const AttentionShape& s) {
  if (!s.deterministic) return s;
  const AttentionPiece piece = cudnn_backward_piece(s, kMostScoreBytes);
  AttentionShape part = s;
  part.batch = piece.batch;
  part.kv_heads = piece.kv_heads;
  part.heads = piece.kv_heads * (s.heads / s.kv_heads);
  return part;
}

/// The part of an operand that starts at a sample and a head. cuDNN's pointers have no const; it only reads
/// inputs.
void* part_of(const void* operand, const HeadStrides& stride, std::int64_t sample, std::int64_t head) {
  const std::int64_t offset = 2 * (sample * stride.batch + head * stride.head);
  return const_cast<char*>(static_cast<const char*>(operand)) + offset;
}

void backward_part(const AttentionBackward& p, const AttentionShape& part, std::int64_t sample,
                   std::int64_t kv_head, const Launch& launch) {
  const AttentionShape& s = p.shape;
  const std::int64_t head = kv_head * (s.heads / s.kv_heads);
  const float* lse = p.lse + (sample * s.heads + head) * s.seq_q;
  Pointers pointers{{kQ, part_of(p.q, s.q_stride, sample, head)},
                    {kK, part_of(p.k, s.k_stride, sample, kv_head)},
                    {kV, part_of(p.v, s.v_stride, sample, kv_head)},
                    {kO, part_of(p.o, s.o_stride, sample, head)},
                    {kGradO, part_of(p.d_o, s.o_stride, sample, head)},
                    {kStats, const_cast<float*>(lse)},
                    {kGradQ, part_of(p.dq, s.q_stride, sample, head)},
                    {kGradK, part_of(p.dk, s.k_stride, sample, kv_head)},
                    {kGradV, part_of(p.dv, s.v_stride, sample, kv_head)}};
  execute(part, true, pointers, p.workspace, launch);
}

std::size_t stats_bytes(const AttentionShape& s) {
  return static_cast<std::size_t>(s.batch * s.heads * s.seq_q) * sizeof(float);
}

}  // namespace

std::string cudnn_refusal(const AttentionShape& shape, bool backward, bool retry) {
  int major = 0;
  check_runtime(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, current_device()),
                "cudaDeviceGetAttribute");
  std::string why = why_not_cudnn(shape, major);
  if (!why.empty()) return why;
  const auto planned = planned_for(backward ? piece_of(shape) : shape, backward, retry);
  const std::lock_guard lock(planned->mutex);
  return planned->graph != nullptr ? "" : planned->refusal;
}

void cudnn_prepare(void* stream) noexcept {
  try {
    handle_of(current_device(), static_cast<cudaStream_t>(stream));
  } catch (const std::exception&) {
    // Not every model needs it. One that does is told by cudnn_refusal.
  }
}

void cudnn_forget(void* stream) noexcept {
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return;
  ProcessState& all = process();
  const std::lock_guard lock(all.mutex);
  const auto found = all.handles.find({device, static_cast<cudaStream_t>(stream)});
  if (found == all.handles.end()) return;
  cudnnDestroy(found->second->handle);
  all.handles.erase(found);
}

std::size_t cudnn_attention_forward_workspace(const AttentionShape& shape) {
  // A call that wants no log-sum-exps leaves them behind the graph's own scratch: one graph serves both.
  return rounded(usable(shape, false)->workspace) + stats_bytes(shape);
}

std::size_t cudnn_attention_backward_workspace(const AttentionShape& shape) {
  return usable(piece_of(shape), true)->workspace;
}

void cudnn_attention_forward(const AttentionForward& p, const Launch& launch) {
  check_memory({p.q, p.k, p.v, p.o});
  float* lse = p.lse;
  if (lse == nullptr) {
    const std::size_t scratch = rounded(usable(p.shape, false)->workspace);
    lse = reinterpret_cast<float*>(static_cast<char*>(p.workspace) + scratch);
  }
  Pointers pointers{{kQ, const_cast<void*>(p.q)},
                    {kK, const_cast<void*>(p.k)},
                    {kV, const_cast<void*>(p.v)},
                    {kO, p.o},
                    {kStats, lse}};
  execute(p.shape, false, pointers, p.workspace, launch);
}

void cudnn_attention_backward(const AttentionBackward& p, const Launch& launch) {
  check_memory({p.q, p.k, p.v, p.o, p.d_o, p.dq, p.dk, p.dv});
  const AttentionShape part = piece_of(p.shape);
  for (std::int64_t sample = 0; sample < p.shape.batch; sample += part.batch) {
    for (std::int64_t head = 0; head < p.shape.kv_heads; head += part.kv_heads)
      backward_part(p, part, sample, head, launch);
  }
}

}  // namespace tessera::kernels::cuda
