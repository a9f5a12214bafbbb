#pragma once
/// Store: a small key-value service through which the processes of a job find each other. One process serves
/// it over TCP, all others are clients. Every connection is authenticated both ways with the job's secret
/// (HMAC-SHA256 challenge) before a byte of a request is read; every wait has a deadline. What follows the
/// challenge is neither encrypted nor signed.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace tessera {

/// Longest key and longest value, in bytes.
constexpr std::size_t kStoreTextLimit = std::size_t{1} << 20;
/// Seconds a client waits for an answer that the server can give at once.
constexpr double kStoreAnswerTimeout = 30;

struct StoreServerOptions {
  /// A connection that has not proved itself after so many seconds is dropped.
  double proof_timeout_s = 5;
  /// So many of them are kept; a new one pushes out the oldest.
  int most_unproved = 256;
  /// Count those that prove to know this secret, which lets nobody in; empty = none.
  std::string counted_secret = {};
};

/// Serves until it is destroyed.
class StoreServer {
 public:
  /// Binds `address` (an IP or host name of this machine) and nothing else; port 0 takes a free one.
  /// Errors: IoError naming both; InvalidArgument for an empty address or secret.
  StoreServer(const std::string& address, std::uint16_t port, const std::string& secret,
              const StoreServerOptions& options = {});
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;
  std::uint16_t port() const;
  /// How many came so far with StoreServerOptions::counted_secret.
  int turned_away() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Ends a wait from another thread.
class Interrupt {
 public:
  /// Errors: IoError.
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;
  void raise() const;
  /// Blocks until raised or until the time has passed; lowers it. True if it was raised.
  bool wait(double timeout_s) const;
  int descriptor() const { return descriptor_; }

 private:
  int descriptor_;
};

/// Called now and then, every kWhileWaiting seconds or so, by a thread that waits for other processes. It may
/// throw, which ends the wait with that exception: how a program's own signal handlers get their turn.
using WhileWaiting = std::function<void()>;
constexpr double kWhileWaiting = 0.1;

/// A client; safe to use from several threads. Every call throws CommunicationTimeout when the server does
/// not answer in time, CommunicationError when it is gone, and InvalidArgument for keys and values above
/// kStoreTextLimit.
class Store {
 public:
  /// Connects, retrying until the deadline (the server may not be up yet).
  /// Errors: CommunicationTimeout: no server there in time; CommunicationError: it does not know the secret.
  Store(const std::string& address, std::uint16_t port, const std::string& secret, double timeout_s,
        WhileWaiting while_waiting = {});
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  void set(const std::string& key, const std::string& value, double timeout_s = kStoreAnswerTimeout);
  /// Waits until the key is there. Errors: CommunicationError naming the key after timeout_s.
  std::string get(const std::string& key, double timeout_s);
  /// The same for a wait that may end without an error: false when the time passed or `interrupt` was raised.
  bool wait_for(const std::string& key, std::string& value, double timeout_s, const Interrupt& interrupt);
  /// False when the key is not there now.
  bool try_get(const std::string& key, std::string& value, double timeout_s = kStoreAnswerTimeout);
  /// Adds to a counter (a key never set is 0) and returns its new value.
  /// Errors: CommunicationError if the key holds something else.
  std::int64_t add(const std::string& key, std::int64_t amount, double timeout_s = kStoreAnswerTimeout);
  void remove(const std::string& key);
  /// Waits until all ranks 0..size-1 have arrived at `name`, which can then be used again.
  /// Errors: CommunicationError that lists the ranks that have not.
  void barrier(const std::string& name, int rank, int size, double timeout_s);
  /// The address of this machine from which the server is reached, as a number.
  const std::string& local_address() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
