#pragma once
/// Work that is recorded instead of run.

#include <memory>
#include <string>
#include <vector>

#include "runtime.hpp"

namespace tessera_emulator {

/// What was put on one or several streams, in that order.
struct Graph {
  enum class Kind { work, record, wait, record_outside, wait_outside };
  struct Node {
    Kind kind = Kind::work;
    std::size_t stream = 0;  ///< place in `streams`
    std::string name = {};
    bool always = false;
    CUstream_st::Work work = {};
    std::function<CUstream_st::Work()> make = {};   ///< or what makes it at each launch
    std::size_t awaited = 0;                        ///< kind wait: which node's record
    std::shared_ptr<CUevent_st::State> event = {};  ///< of the outside kinds
  };

  std::mutex mutex;
  std::vector<CUstream_st*> streams;  ///< the first is where the recording was begun
  std::vector<Node> nodes;
  bool open = true;
  bool broken = false;  ///< by a call that cannot be recorded

  /// Errors: cudaErrorStreamCaptureInvalidated.
  cudaError_t add(const CUstream_st& stream, Node node);
  /// Whether `streams.front()` waits for all that others do.
  bool is_joined() const;
};

/// Notes that the stream, if it is being recorded, was asked for what no recording can tell; the error for
/// that.
cudaError_t refuse_if_recorded(CUstream_st& stream);

}  // namespace tessera_emulator
