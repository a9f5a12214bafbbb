#pragma once
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "launch/failure.hpp"
#include "tessera/comm/store.hpp"
#include "tessera/launch/launch.hpp"

namespace tessera::launching {

/// What has become known of the other machines.
struct News {
  bool joined = false;             ///< the launchers of all machines are there
  bool failed = false;             ///< a worker failed on some machine in this attempt
  std::optional<Outcome> verdict;  ///< the outcome of the attempt on all machines
  std::string lost;                ///< why the others cannot be reached any more; empty = they can
};

/// The link between the launchers of a job's machines, through the store: a thread that tells what happened
/// here and learns what happened there. Machine 0 makes the verdict out of the outcomes of all.
class Machines {
 public:
  /// `server`: the store, on the machine that serves it. Errors: IoError.
  Machines(const LaunchOptions& options, std::string secret, std::string host, const StoreServer* server);
  /// Machine 0 stays until the others have read the verdict, a few seconds at most.
  ~Machines();

  /// Readable when there is news.
  int fd() const { return event_; }
  News news();
  /// A new attempt begins here.
  void begin(int attempt);
  /// A worker failed here: the other machines end theirs.
  void failed();
  /// All workers here have ended.
  void ended(const Outcome& outcome);

 private:
  struct Peer {
    std::string host, beat;
    double heard_s = 0;  ///< when its beat last changed
    bool lost = false;
  };

  void run();
  bool join();
  bool connect(double deadline_s);
  void meet(double deadline_s);
  void refuse_mismatch();
  std::string mismatch() const;
  void farewell(int first, int end);
  void exchange_in_time();
  void exchange();
  void listen();
  void judge(int attempt, bool failing);
  void announce();
  bool pause(double seconds);
  std::string key(const std::string& what, int machine) const;
  std::string attempt_key(int attempt, const std::string& what) const;

  const LaunchOptions& options_;
  const std::string secret_, host_;
  const StoreServer* const server_;
  std::unique_ptr<Store> store_;
  std::vector<Peer> peers_;
  std::uint64_t beats_ = 0;
  double reached_s_ = 0;  ///< when the store was last known to answer
  int event_ = -1;

  std::mutex mutex_;
  std::condition_variable stop_changed_;
  bool stop_ = false;
  News news_;
  int attempt_ = 0;
  bool failed_ = false, failed_told_ = false;
  std::optional<Outcome> outcome_;
  bool outcome_told_ = false;
  std::thread thread_;
};

}  // namespace tessera::launching
