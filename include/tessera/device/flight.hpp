#pragma once
/// The flight recorder: what a rank was doing when it stopped doing anything. It keeps the last operations of
/// a rank (kernels, communication, calls) with their states and times. Recording one takes a mutex that is
/// free, the clock and some stores; nothing is allocated. It belongs to a rank and is passed on: by the
/// rank's streams (Stream::set_flight) and communicators (Communicator::set_flight).

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tessera/device/stream.hpp"

namespace tessera {

/// One operation. Texts are literals: they are kept as pointers.
struct FlightOperation {
  enum class Kind : std::uint8_t { kernel, communication, call };
  Kind kind = Kind::kernel;
  const char* name = "";
  const char* dtype = "";
  std::array<std::int64_t, 4> shape{};  ///< as far as `dims`
  int dims = 0;
  int group = -1;  ///< communication: FlightRecorder::add_group
  int peer = -1;   ///< communication of two ranks: the other one's rank in the group
  std::uint64_t sequence = 0;
  std::uint64_t bytes = 0;
};

struct FlightRecord {
  enum class State : std::uint8_t { queued, running, done };
  FlightOperation what;
  std::uint64_t number = 0;  ///< of this rank's operations, from 0
  State state = State::queued;
  bool waited = false;                          ///< the rank's own thread waits, or waited, for it
  double queued_s = 0, begin_s = 0, end_s = 0;  ///< in the seconds of now_s(); 0: not yet
};

/// A group of ranks that operations name.
struct FlightGroup {
  std::string name;
  std::vector<int> ranks;  ///< numbers in the job; empty if they are not known
  int instance = 0;        ///< how many groups with this name and these ranks there were before it
};

/// All that a recorder knows, by number.
struct FlightSnapshot {
  std::vector<FlightRecord> records;
  std::vector<FlightGroup> groups;
  std::string call;    ///< the outermost call that is open; empty: none
  double call_s = 0;   ///< when it began
  double taken_s = 0;  ///< when this was taken
};

class FlightRecorder {
 public:
  static constexpr std::size_t kKept = 1000;  ///< kernels and calls; and as many communications

  FlightRecorder();
  FlightRecorder(const FlightRecorder&) = delete;
  FlightRecorder& operator=(const FlightRecorder&) = delete;

  /// From any thread. Returns the operation's number, for those below, which ignore one that is kept no
  /// longer.
  std::uint64_t add(const FlightOperation& what, FlightRecord::State state);
  void begin(std::uint64_t number, FlightOperation::Kind kind);
  void end(std::uint64_t number, FlightOperation::Kind kind);
  /// The rank's own thread waits for communication `number`, or does so no longer.
  void begin_wait(std::uint64_t number);
  void end_wait();
  /// Work of an asynchronous stream: everything launched before operation `number` is known to be over.
  void reached(std::uint64_t number);
  /// The number of the next operation.
  std::uint64_t next() const;

  /// A number for FlightOperation::group.
  int add_group(const std::string& name, std::vector<int> ranks);

  /// A call into the library begins, ends. They nest.
  void open_call(const char* name);
  void close_call();
  /// Something moved that is no operation, such as a file being read.
  void note_progress();

  /// For whoever watches: calls open, waits of the rank's own thread for communication, and a number that
  /// changes with everything that happens here.
  struct Pulse {
    int calls = 0, waits = 0;
    std::uint64_t events = 0;
  };
  Pulse pulse() const;
  FlightSnapshot snapshot() const;

 private:
  FlightRecord* find(std::uint64_t number, FlightOperation::Kind kind);

  mutable std::mutex mutex_;
  std::vector<FlightRecord> work_, communication_;  ///< rings of kKept
  std::uint64_t works_ = 0, communications_ = 0;    ///< how many went into each
  std::uint64_t next_ = 0, reached_ = 0, events_ = 0;
  std::vector<FlightGroup> groups_;
  int calls_ = 0, waits_ = 0;
  const char* call_ = "";
  double call_s_ = 0;
};

/// Tells a stream's recorder, if it has one, of a kernel from its construction to its end of life. On a
/// stream that runs later it stays queued until reached().
class FlightSpan {
 public:
  template <typename Describe>
  FlightSpan(const Stream& stream, Describe&& describe) : recorder_(stream.flight().get()) {
    if (recorder_ == nullptr) return;
    later_ = stream.is_asynchronous();
    number_ = recorder_->add(describe(), later_ ? FlightRecord::State::queued : FlightRecord::State::running);
  }
  ~FlightSpan() {
    if (recorder_ != nullptr && !later_) recorder_->end(number_, FlightOperation::Kind::kernel);
  }
  FlightSpan(const FlightSpan&) = delete;
  FlightSpan& operator=(const FlightSpan&) = delete;

 private:
  FlightRecorder* recorder_;
  std::uint64_t number_ = 0;
  bool later_ = false;
};

/// A call into the library, from its construction to its end of life. `recorder` may be null; `name` is a
/// literal.
class FlightCall {
 public:
  FlightCall(std::shared_ptr<FlightRecorder> recorder, const char* name) : recorder_(std::move(recorder)) {
    if (recorder_) recorder_->open_call(name);
  }
  ~FlightCall() {
    if (recorder_) recorder_->close_call();
  }
  FlightCall(const FlightCall&) = delete;
  FlightCall& operator=(const FlightCall&) = delete;

 private:
  std::shared_ptr<FlightRecorder> recorder_;
};

/// The rank's own thread waits for a communication.
class FlightWait {
 public:
  FlightWait(FlightRecorder* recorder, std::uint64_t number) : recorder_(recorder) {
    if (recorder_ != nullptr) recorder_->begin_wait(number);
  }
  ~FlightWait() {
    if (recorder_ != nullptr) recorder_->end_wait();
  }
  FlightWait(const FlightWait&) = delete;
  FlightWait& operator=(const FlightWait&) = delete;

 private:
  FlightRecorder* recorder_;
};

}  // namespace tessera
