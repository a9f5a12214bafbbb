#include "comm/nccl/lane.hpp"

#include <chrono>
#include <exception>
#include <set>
#include <thread>
#include <utility>

#include "device/cuda.hpp"
#include "tessera/base/error.hpp"

namespace tessera {
namespace {

using Clock = NcclTask::Clock;

constexpr auto kPoll = std::chrono::microseconds(20);
/// So long NCCL is asked again and again before a thread sleeps in between: launches take some microseconds,
/// a sleep at least fifty.
constexpr auto kPatienceAwake = std::chrono::milliseconds(2);
/// How long the end of a lane whose job has failed waits for others: kernels that were told to end, a thread
/// that is inside NCCL.
constexpr auto kPatience = std::chrono::seconds(5);

/// Where the runtime fails there is nothing left to wait for.
bool is_over(const NcclTask& task) noexcept {
  try {
    return task.done();
  } catch (const std::exception&) {
    return true;
  }
}

}  // namespace

void NcclCalls::add(ncclResult_t returned, const char* call) {
  if (result != ncclSuccess || returned == ncclSuccess || returned == ncclInProgress) return;
  result = returned;
  failed_call = call;
}

NcclLane::NcclLane(NcclJob& job, Options options)
    : job_(job), options_(std::move(options)), stream_(job_.device(), Stream::Priority::high) {
  config_.blocking = 0;
  if (options_.max_ctas > 0) config_.maxCTAs = options_.max_ctas;
}

NcclLane::~NcclLane() {
  end_kernels();  // nothing to do after an orderly end
  for (const auto end = Clock::now() + kPatience; !in_flight_.empty() && Clock::now() < end;) {
    if (is_over(*in_flight_.front())) {
      in_flight_.pop_front();
    } else {
      std::this_thread::sleep_for(kPoll);
    }
  }
}

void NcclLane::close() {
  std::unique_lock lock(mutex_);
  if (std::uncaught_exceptions() > 0 && !in_flight_.empty())
    job_.fail_here("this rank gave up with operations under way");
  while (!in_flight_.empty() && !job_.failed()) {  // the watchdog takes them away; it may be slow to look
    changed_.wait_for(lock, std::chrono::milliseconds(20));
  }
  lock.unlock();
  const std::lock_guard nccl(nccl_mutex_);
  if (job_.failed() || comm_ == nullptr) return;
  settle(ncclCommFinalize(comm_), "ncclCommFinalize");
  ncclCommDestroy(comm_);
  comm_ = nullptr;
}

ncclUniqueId NcclLane::make_id() {
  ncclUniqueId id;
  const ncclResult_t result = ncclGetUniqueId(&id);
  TESSERA_ENSURE(CommunicationError, result == ncclSuccess,
                 "ncclGetUniqueId failed: ", ncclGetErrorString(result), ". ", ncclGetLastError(nullptr));
  return id;
}

void NcclLane::connect(const ncclUniqueId& id, const WarmUp& warm_up) {
  const std::lock_guard nccl(nccl_mutex_);
  job_.check("connecting " + options_.name);
  cuda::use_device(job_.device().index);
  settle(ncclCommInitRankConfig(&comm_, options_.size, id, options_.rank, &config_),
         "ncclCommInitRankConfig");
  begin(warm_up);
}

void NcclLane::connect(NcclLane& parent, int color, const WarmUp& warm_up) {
  const std::lock_guard nccl(nccl_mutex_);
  comm_ = parent.split(color, options_.rank, &config_);
  settle(ncclInProgress, "ncclCommSplit");  // the parent has done its part, this one perhaps not
  begin(warm_up);
}

void NcclLane::stay_out(NcclLane& parent) {
  ncclConfig_t config = parent.config_;
  parent.split(NCCL_SPLIT_NOCOLOR, 0, &config);
}

ncclComm_t NcclLane::split(int color, int rank, ncclConfig_t* config) {
  const std::string doing = "splitting " + options_.name;
  {
    std::unique_lock lock(mutex_);  // NCCL wants nothing under way
    while (!in_flight_.empty()) {
      job_.check(doing);
      changed_.wait_for(lock, std::chrono::milliseconds(20));
    }
  }
  const std::lock_guard nccl(nccl_mutex_);
  job_.check(doing);
  TESSERA_ENSURE(CommunicationError, connected_ && comm_ != nullptr, options_.name,
                 " cannot be split: it has ended");
  cuda::use_device(job_.device().index);
  split_off_.push_back(nullptr);
  settle(ncclCommSplit(comm_, color, rank, &split_off_.back(), config), "ncclCommSplit");
  ncclComm_t made = split_off_.back();
  split_off_.pop_back();
  TESSERA_ENSURE(CommunicationError, (made != nullptr) == (color >= 0), options_.name,
                 ": ncclCommSplit gave no communicator for colour ", color);
  return made;
}

void NcclLane::begin(const WarmUp& warm_up) {
  ncclGroupStart();
  NcclCalls calls(comm_, stream_);
  warm_up(calls, job_.warm_up_memory());
  finish(calls, ncclGroupEnd());
  Event end;
  stream_.record(end);
  for (const auto begin = Clock::now(); !end.done(); std::this_thread::sleep_for(kPoll)) {
    job_.check("connecting " + options_.name);
    TESSERA_ENSURE(CommunicationError, !job_.is_overdue(begin, options_.timeout_s), options_.name,
                   ": NCCL moved no first bytes within ", options_.timeout_s, " s");
  }
  connected_ = true;
  for (const Posted& posted : waiting_) launch({posted});
  waiting_.clear();
}

void NcclLane::post(std::vector<Posted> posted) {
  std::set<NcclLane*> lanes;  // in the order of their addresses, as all threads lock them
  for (const Posted& each : posted) lanes.insert(each.lane);
  std::vector<std::unique_lock<std::timed_mutex>> locks;
  for (NcclLane* const lane : lanes) locks.emplace_back(lane->nccl_mutex_);
  for (const Posted& each : posted) each.lane->job_.check(each.task->text() + " was called");
  std::vector<Posted> now;
  for (Posted& each : posted) {
    if (each.lane->connected_) {
      now.push_back(std::move(each));
    } else {
      each.lane->waiting_.push_back(std::move(each));
    }
  }
  launch(now);
}

/// One group of NCCL, whatever lanes the calls are on: each group costs the host a thread of NCCL's.
void NcclLane::launch(const std::vector<Posted>& posted) {
  if (posted.empty()) return;
  std::vector<NcclCalls> calls;
  for (const Posted& each : posted) each.lane->stream_.wait(each.task->ready);
  ncclGroupStart();
  for (const Posted& each : posted) each.work(calls.emplace_back(each.lane->comm_, each.lane->stream_));
  const ncclResult_t end = ncclGroupEnd();
  for (std::size_t i = 0; i < posted.size(); ++i) posted[i].lane->finish(calls[i], end);
  for (const Posted& each : posted) each.lane->note_launch(each.task);
  posted.front().lane->job_.wake();
}

void NcclLane::note_launch(const TaskPtr& task) {
  stream_.record(task->end);
  task->in_graph = stream_.is_recorded();
  if (task->again) {
    // Not the task, whose events hold the recording, which holds this.
    stream_.when_relaunched([this, what = task->what, again = task->again](const Event& launch) {
      note_relaunch(what, again(), launch);
    });
  }
  fly(task);
}

/// A graph that this is part of is about to be launched once more.
void NcclLane::note_relaunch(std::shared_ptr<const NcclTask::What> what, RepeatedCall again,
                             const Event& launch) {
  auto task = std::make_shared<NcclTask>(std::vector<Tensor>());
  task->what = std::move(what);
  task->sequence = again.sequence;
  task->in_graph = true;
  task->ready = task->end = launch;
  task->finished = std::move(again.finished);
  if (job_.failed()) job_.check(task->text() + " was called");
  fly(task);
  job_.wake();
}

void NcclLane::fly(const TaskPtr& task) {
  {
    const std::lock_guard lock(mutex_);
    in_flight_.push_back(task);
    task->launched = true;
  }
  changed_.notify_all();
}

/// After the end of a group that `calls` were part of.
void NcclLane::finish(const NcclCalls& calls, ncclResult_t end) {
  if (calls.result != ncclSuccess) settle(calls.result, calls.failed_call);
  settle(end, "ncclGroupEnd");
}

void NcclLane::settle(ncclResult_t result, const char* call) {
  if (result == ncclSuccess) return;
  const auto begin = Clock::now();
  while (result == ncclInProgress) {
    job_.check(detail::concat(options_.name, " was in ", call));
    TESSERA_ENSURE(CommunicationError, !job_.is_overdue(begin, options_.timeout_s), options_.name, ": ", call,
                   " was not done within ", options_.timeout_s, " s");
    if (Clock::now() - begin < kPatienceAwake) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kPoll);
    }
    const ncclResult_t asked = ncclCommGetAsyncError(comm_, &result);
    if (asked != ncclSuccess) result = asked;
  }
  TESSERA_ENSURE(CommunicationError, result == ncclSuccess, options_.name, ": ", call,
                 " failed: ", ncclGetErrorString(result), ". ", ncclGetLastError(comm_));
}

bool NcclLane::is_connected() {
  const std::lock_guard nccl(nccl_mutex_);
  return connected_;
}

void NcclLane::await_launch(const NcclTask& task) {
  std::unique_lock lock(mutex_);
  while (!task.launched) {
    job_.check(task.text() + " was waiting");
    changed_.wait_for(lock, std::chrono::milliseconds(20));
  }
}

/// Takes away what has ended. Whether something is left.
bool NcclLane::retire() {
  for (;;) {
    TaskPtr task;
    {
      const std::lock_guard lock(mutex_);
      if (in_flight_.empty()) return false;
      task = in_flight_.front();
    }
    if (!task->end.done()) return true;
    task->report_stall();
    if (task->finished) task->finished(task->timed ? job_.time_of(task->end) : 0);
    {
      const std::lock_guard lock(mutex_);
      in_flight_.pop_front();
    }
    changed_.notify_all();
  }
}

bool NcclLane::look() {
  if (!retire()) return false;
  TaskPtr front;
  {
    const std::lock_guard lock(mutex_);
    front = in_flight_.front();
  }
  {
    const std::unique_lock nccl(nccl_mutex_, std::try_to_lock);
    ncclResult_t state = ncclSuccess;
    if (nccl && comm_ != nullptr) ncclCommGetAsyncError(comm_, &state);
    if (state != ncclSuccess && state != ncclInProgress) {
      job_.fail(detail::concat(front->text(), ": NCCL on rank ", job_.rank(), " reports ",
                               ncclGetErrorString(state), ". ", ncclGetLastError(comm_)));
      return true;
    }
  }
  if (!front->began && front->ready.has_begun()) front->began = Clock::now();
  if (front->began && job_.is_overdue(*front->began, options_.timeout_s)) job_.fail(options_.explain(*front));
  return true;
}

std::deque<NcclLane::Posted> NcclLane::end_kernels() {
  if (aborted_) return {};
  // A thread may hang in a launch because the stream is full, until the kernels end; so the lock is not
  // waited for for ever.
  const std::unique_lock nccl(nccl_mutex_, kPatience);
  aborted_ = true;
  std::deque<Posted> dropped = std::exchange(waiting_, {});
  if (comm_ != nullptr) ncclCommAbort(comm_);
  comm_ = nullptr;
  for (ncclComm_t unfinished : split_off_) {
    if (unfinished != nullptr) ncclCommAbort(unfinished);
  }
  split_off_.clear();
  changed_.notify_all();
  return dropped;
}

}  // namespace tessera
