#pragma once
/// A lane: one NCCL communicator with a stream of its own, on which operations run one after the other. A
/// group has one for its collectives, and for every rank it exchanges messages with two more of two ranks
/// each, one per direction. So nothing waits behind a message but later messages of the same direction
/// between the same ranks.

#include <nccl.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/nccl/job.hpp"
#include "comm/nccl/task.hpp"

namespace tessera {

/// The NCCL calls of one operation, all in one NCCL group.
class NcclCalls {
 public:
  NcclCalls(ncclComm_t comm, Stream& stream) : comm(comm), stream(stream) {}
  const ncclComm_t comm;
  Stream& stream;
  cudaStream_t native() const { return static_cast<cudaStream_t>(stream.native()); }
  /// Notes what a call returned.
  void add(ncclResult_t result, const char* call);

  ncclResult_t result = ncclSuccess;
  const char* failed_call = "ncclGroupEnd";
};

class NcclLane {
 public:
  using TaskPtr = std::shared_ptr<NcclTask>;
  using Work = std::function<void(NcclCalls&)>;
  using WarmUp = std::function<void(NcclCalls&, void*)>;

  /// An operation for a lane, which outlives it.
  struct Posted {
    NcclLane* lane = nullptr;
    TaskPtr task;
    Work work;
  };

  struct Options {
    std::string name;        ///< for messages: "group dp", "messages from rank 0 to 1 in group pp"
    int rank = 0, size = 0;  ///< in this lane
    int max_ctas = 0;        ///< thread blocks of a kernel; 0: NCCL decides
    double timeout_s = 0;
    /// Why the host communicator failed; empty while it works.
    std::function<std::string()> host_failure;
    /// Asks other ranks why an operation does not end; a message for the error.
    std::function<std::string(const NcclTask&)> explain;
  };

  /// `job` outlives the lane.
  NcclLane(NcclJob& job, Options options);
  /// Any thread. Without close() before, this ends what is under way.
  ~NcclLane();
  NcclLane(const NcclLane&) = delete;
  NcclLane& operator=(const NcclLane&) = delete;

  /// An id for a new lane; one rank makes it and tells the others.
  static ncclUniqueId make_id();
  /// Collective over the ranks of the lane, blocks. Afterwards NCCL has all its connections, as `warm_up`
  /// uses them (it gets device memory of NcclJob::kWarmUpBytes), and what was posted before is launched.
  /// Errors: CommunicationError.
  void connect(const ncclUniqueId& id, const WarmUp& warm_up);
  /// The same for a lane of some of the ranks of `parent`, cut out of it (ncclCommSplit). Every rank of
  /// `parent` comes, those of other lanes with their `color` (not negative), those of none to stay_out.
  /// `parent` has been connected; what was posted on it ends first.
  void connect(NcclLane& parent, int color, const WarmUp& warm_up);
  static void stay_out(NcclLane& parent);

  /// Launches each after task->ready, all together; what is on a lane that is not connected yet is left to
  /// its connect(). Errors: CommunicationError.
  static void post(std::vector<Posted> posted);
  /// Whether connect() has ended well.
  bool is_connected();
  /// Blocks until the task is launched. Errors: CommunicationError when the job has failed.
  void await_launch(const NcclTask& task);

  /// The orderly end: returns when what was posted has ended, or the job has failed. Errors:
  /// CommunicationError.
  void close();

  /// For the watchdog: lets go of what has ended, finds errors and deadlines. Whether anything is in flight.
  bool look();
  /// For the watchdog: ends the kernels of this lane. Returns what was never launched, which may hold the
  /// last reference to memory.
  std::deque<Posted> end_kernels();
  std::string host_failure() const { return options_.host_failure(); }

 private:
  /// This rank's part of a new lane with that colour; null without one.
  ncclComm_t split(int color, int rank, ncclConfig_t* config);
  void begin(const WarmUp& warm_up);
  static void launch(const std::vector<Posted>& posted);
  void note_launch(const TaskPtr& task);
  void note_relaunch(std::shared_ptr<const NcclTask::What> what, RepeatedCall again, const Event& launch);
  void fly(const TaskPtr& task);
  void finish(const NcclCalls& calls, ncclResult_t end);
  /// Waits until NCCL has done in the background what it could not do at once.
  void settle(ncclResult_t result, const char* call);
  bool retire();

  NcclJob& job_;
  const Options options_;
  Stream stream_;
  ncclConfig_t config_ = NCCL_CONFIG_INITIALIZER;

  std::timed_mutex nccl_mutex_;  ///< guards what follows; held during calls of NCCL
  ncclComm_t comm_ = nullptr;
  bool connected_ = false, aborted_ = false;
  std::deque<Posted> waiting_;  ///< for the connection
  /// Where NCCL leaves what it splits off, in its own time: until comm_ has ended.
  std::deque<ncclComm_t> split_off_;

  mutable std::mutex mutex_;  ///< guards in_flight_
  std::condition_variable changed_;
  std::deque<TaskPtr> in_flight_;
};

}  // namespace tessera
