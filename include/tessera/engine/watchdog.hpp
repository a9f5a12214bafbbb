#pragma once
/// Ends a run in which nothing moves any more, and writes down what each rank was doing.

#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "tessera/comm/communicator.hpp"
#include "tessera/device/flight.hpp"

namespace tessera {

struct WatchdogOptions {
  double timeout_s = 600;        ///< so long a call may be open without anything that begins or ends
  double grace_s = 1.5;          ///< for the call to throw, once the communicators were ended
  std::filesystem::path folder;  ///< where dumps go: rank-N.json; made when there is one to write
  /// Called from the watchdog's thread when the call did not return: only the program can end it now, as a
  /// thread that hangs in the system or on a GPU cannot be ended alone. It must not touch what that thread
  /// may hold. Programs end with exit_code::kNoAnswer.
  std::function<void(const std::string& message)> on_hang = {};
  /// Asked a few times a second: whether somebody wants a dump now.
  std::function<bool()> dump_asked = {};
  /// Told where a dump that was asked for lies, or why there is none. From the watchdog's thread.
  std::function<void(const std::string& message)> on_dump = {};
};

/// Watches one rank. While a call (FlightCall) is open and its recorder hears of nothing for timeout_s, the
/// watchdog writes a dump and ends the world with the reason, so that what waits for other ranks throws; if
/// the call still does not return, on_hang is called. Between calls time does not count, nor while the
/// process is stopped. It also writes a dump when a wait for other ranks ended without them.
class Watchdog {
 public:
  /// `world`: all ranks of the job, or a group of one; gets a recorder if it has none. Before groups are
  /// split off it.
  Watchdog(std::shared_ptr<Communicator> world, WatchdogOptions options);
  /// Writes the dump if a wait for other ranks has just ended without them.
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  /// From now on dumps go there.
  void set_folder(const std::filesystem::path& folder);
  /// Writes the dump now, and returns its path. Gives up after some seconds if the file system does not
  /// answer. Errors: IoError.
  std::filesystem::path dump(const std::string& why);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The file that one rank wrote, as JSON: `why`, the open call, the last operations. Times are Unix seconds.
std::string flight_json(const FlightSnapshot& flight, int rank, int world_size, const std::string& why);

/// What the dumps in a folder (a run's folder, or flight/ in it) say together: who waits for whom, the rank
/// that is behind, the first operation in which ranks differ. Errors: DataError when there is no dump, or one
/// is damaged.
std::string compare_flights(const std::filesystem::path& folder);

}  // namespace tessera
