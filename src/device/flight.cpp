#include "tessera/device/flight.hpp"

#include <algorithm>
#include <exception>

#include "tessera/base/clock.hpp"

namespace tessera {

using Kind = FlightOperation::Kind;
using State = FlightRecord::State;
using Lock = std::lock_guard<std::mutex>;

namespace {

/// Numbers of one ring grow, but not by one each: the other ring's lie between.
FlightRecord* look_up(std::vector<FlightRecord>& ring, std::uint64_t count, std::uint64_t number) {
  const std::size_t kept = ring.size(), filled = std::min<std::uint64_t>(count, kept);
  std::uint64_t low = count - filled, high = count;
  while (low < high) {
    const std::uint64_t middle = low + (high - low) / 2;
    FlightRecord& record = ring[middle % kept];
    if (record.number == number) return &record;
    if (record.number < number) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return nullptr;
}

}  // namespace

FlightRecorder::FlightRecorder() : work_(kKept), communication_(kKept) {}

FlightRecord* FlightRecorder::find(std::uint64_t number, Kind kind) {
  if (kind == Kind::communication) return look_up(communication_, communications_, number);
  // What ends is nearly always what began last.
  FlightRecord& last = work_[(works_ + kKept - 1) % kKept];
  return last.number == number && works_ > 0 ? &last : look_up(work_, works_, number);
}

std::uint64_t FlightRecorder::add(const FlightOperation& what, State state) {
  const double now = now_s();
  const Lock lock(mutex_);
  const bool communicates = what.kind == Kind::communication;
  FlightRecord& record = communicates ? communication_[communications_++ % kKept] : work_[works_++ % kKept];
  record.what = what;
  record.number = next_++;
  record.state = state;
  record.waited = false;
  record.queued_s = now;
  record.begin_s = state == State::queued ? 0 : now;
  record.end_s = 0;
  ++events_;
  return record.number;
}

void FlightRecorder::begin(std::uint64_t number, Kind kind) {
  const double now = now_s();
  const Lock lock(mutex_);
  ++events_;
  FlightRecord* const record = find(number, kind);
  if (record == nullptr || record->state != State::queued) return;
  record->state = State::running;
  record->begin_s = now;
}

void FlightRecorder::end(std::uint64_t number, Kind kind) {
  const double now = now_s();
  const Lock lock(mutex_);
  ++events_;
  FlightRecord* const record = find(number, kind);
  if (record == nullptr) return;
  record->state = State::done;
  record->end_s = now;
}

void FlightRecorder::begin_wait(std::uint64_t number) {
  const Lock lock(mutex_);
  ++waits_;
  if (FlightRecord* const record = find(number, Kind::communication)) record->waited = true;
}

void FlightRecorder::end_wait() {
  const Lock lock(mutex_);
  --waits_;
  ++events_;
}

void FlightRecorder::reached(std::uint64_t number) {
  const Lock lock(mutex_);
  reached_ = std::max(reached_, number);
  ++events_;
}

std::uint64_t FlightRecorder::next() const {
  const Lock lock(mutex_);
  return next_;
}

int FlightRecorder::add_group(const std::string& name, std::vector<int> ranks) {
  const Lock lock(mutex_);
  const auto same = std::count_if(groups_.begin(), groups_.end(), [&](const FlightGroup& group) {
    return group.name == name && group.ranks == ranks;
  });
  groups_.push_back({name, std::move(ranks), static_cast<int>(same)});
  return static_cast<int>(groups_.size()) - 1;
}

void FlightRecorder::open_call(const char* name) {
  const double now = now_s();
  const Lock lock(mutex_);
  ++events_;
  if (calls_++ > 0) return;
  call_ = name;
  call_s_ = now;
}

void FlightRecorder::close_call() {
  const Lock lock(mutex_);
  ++events_;
  // One that ends by an exception is what the rank was in: a dump that is written afterwards still says so.
  if (--calls_ == 0 && std::uncaught_exceptions() == 0) call_ = "";
}

void FlightRecorder::note_progress() {
  const Lock lock(mutex_);
  ++events_;
}

FlightRecorder::Pulse FlightRecorder::pulse() const {
  const Lock lock(mutex_);
  return {calls_, waits_, events_};
}

FlightSnapshot FlightRecorder::snapshot() const {
  FlightSnapshot snapshot;
  snapshot.records.reserve(2 * kKept);
  const auto take = [&](const std::vector<FlightRecord>& ring, std::uint64_t count) {
    for (std::uint64_t i = count - std::min<std::uint64_t>(count, kKept); i < count; ++i)
      snapshot.records.push_back(ring[i % kKept]);
  };
  {
    const Lock lock(mutex_);
    take(work_, works_);
    take(communication_, communications_);
    snapshot.groups = groups_;
    snapshot.taken_s = now_s();
    snapshot.call = call_;
    snapshot.call_s = call_s_;
    for (FlightRecord& record : snapshot.records) {
      const bool over = record.state == State::queued && record.number < reached_;
      if (over && record.what.kind == Kind::kernel) record.state = State::done;
    }
  }
  std::sort(snapshot.records.begin(), snapshot.records.end(),
            [](const FlightRecord& a, const FlightRecord& b) { return a.number < b.number; });
  return snapshot;
}

}  // namespace tessera
