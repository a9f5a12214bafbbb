#pragma once
/// One TCP connection to every other rank, whose two ends have proved to each other that they know the job's
/// secret and which ranks they are.
///
/// Every rank listens on one port until all have come. A rank calls those with lower numbers:
///   called -> caller  magic, 32 random bytes;
///   caller -> called  its rank (4 bytes, little endian), 32 random bytes, its proof (32 bytes);
///   called -> caller  its proof (32 bytes).
/// The proofs are those of the store (store_wire.hpp) under a key of their own, and name job, ranks and
/// direction. Who proves nothing is dropped after some seconds and holds up nobody.

#include <string>
#include <vector>

#include "comm/store_wire.hpp"

namespace tessera {

struct PeersOptions {
  int rank = 0, size = 1;
  std::string address;  ///< number of this rank's address
  std::string job;      ///< the proofs of other jobs are not ours
  std::string key;      ///< from the job's secret
  std::string name;     ///< of this process, for messages
  double timeout_s = 0;
  double proof_timeout_s = 5;       ///< for each connection
  std::size_t most_unproved = 256;  ///< kept besides one for each rank; a new one pushes out the oldest
};

class Peers {
 public:
  /// Listens. Errors: IoError.
  explicit Peers(PeersOptions options);
  std::uint16_t port() const { return store::port_of(listener_); }
  /// By rank; the own place stays empty. `lower`: address and port of each lower rank. Call it once. Errors:
  /// CommunicationError naming the ranks without a connection at the deadline.
  std::vector<store::Socket> connect(const std::vector<std::pair<std::string, std::uint16_t>>& lower);

 private:
  /// Somebody who called here.
  struct Caller {
    store::Socket socket;
    store::Digest nonce;
    store::Deadline until;
    std::string in;
  };
  /// A lower rank that is being called.
  struct Call {
    enum class State { pausing, connecting, greeting, proving };
    int peer = 0;
    std::pair<std::string, std::uint16_t> place;
    State state = State::pausing;
    store::Socket socket;
    std::string in;
    store::Digest own{}, theirs{};
    store::Deadline next{};  ///< of pausing: when to try again
    double pause_s = 0.02;
    std::string trouble = "no answer";
  };

  store::Digest proof(const char* who, int called, int caller, const store::Digest& called_nonce,
                      const store::Digest& caller_nonce) const;
  void start(Call& call);
  void again(Call& call, std::string trouble);
  void go_on(Call& call, short events);
  void greet(Call& call);
  void accept_callers();
  /// False when the connection is of no further use here: proved and taken over, or lost.
  bool hear(Caller& caller);
  void turn();
  bool complete() const;
  /// The error that names who is missing; ends what is half done with others.
  [[noreturn]] void give_up();

  PeersOptions options_;
  store::Socket listener_;
  std::vector<store::Socket> connected_;
  std::vector<Call> calls_;
  std::vector<Caller> callers_;  ///< oldest first
  store::Deadline deadline_{}, accept_again_{};
};

}  // namespace tessera
