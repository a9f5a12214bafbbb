#pragma once
/// Between the threads that talk to clients and the one that computes.

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "tessera/engine/continuous.hpp"

namespace tessera::cli::serving {

/// What clients of one request hear.
struct Inbox {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<TextNews> news;
};

class Desk;

/// A request that was taken. Its texts go no further when it goes.
class Ticket {
 public:
  Ticket(Desk& desk, std::vector<std::uint64_t> ids, std::shared_ptr<Inbox> inbox)
      : desk_(desk), ids_(std::move(ids)), inbox_(std::move(inbox)) {}
  ~Ticket();
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;

  /// The next news, of prompt number `index(id)`; nullopt if there are none within `wait`.
  std::optional<TextNews> next(std::chrono::milliseconds wait);
  std::size_t index(std::uint64_t id) const { return static_cast<std::size_t>(id - ids_.front()); }
  /// Of a prompt whose texts are known well enough.
  void cancel(std::size_t index);

 private:
  Desk& desk_;
  std::vector<std::uint64_t> ids_;
  std::shared_ptr<Inbox> inbox_;
};

/// Why a request is not taken.
struct Refused {
  bool ending = false;  ///< the server ends; otherwise there are too many
};

class Desk {
 public:
  /// `most_texts`: under way or waiting at once. `check`: refuses what cannot be, safe on any thread.
  Desk(std::int64_t most_texts, std::function<void(const TextRequest&)> check)
      : most_texts_(most_texts), check_(std::move(check)) {}

  /// Takes requests of prompts, all or none; their ids are written here. Errors: Refused; InvalidArgument.
  std::unique_ptr<Ticket> submit(std::vector<TextRequest> requests);

  // For the thread that computes:
  /// What came since the last call; waits for it, at most so long.
  ContinuousGenerator::Orders take(std::chrono::milliseconds wait);
  void deliver(std::vector<TextNews> news);
  /// From now on nothing is taken.
  void close();
  /// Ends what is under way with a failure.
  void abandon(const std::string& why);
  std::int64_t texts() const;

 private:
  friend class Ticket;
  void cancel(std::uint64_t id);

  struct Known {
    std::shared_ptr<Inbox> inbox;
    std::int64_t texts = 0;
  };

  const std::int64_t most_texts_;
  const std::function<void(const TextRequest&)> check_;
  mutable std::mutex mutex_;
  std::condition_variable came_;
  std::map<std::uint64_t, Known> known_;
  ContinuousGenerator::Orders orders_;
  std::int64_t texts_ = 0;
  std::uint64_t next_id_ = 1;
  bool closed_ = false;
};

}  // namespace tessera::cli::serving
