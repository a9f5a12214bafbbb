#pragma once
/// What one rank's flight recorder held when it was written down, as read back from its file.

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace tessera {

struct FlightDump {
  struct Group {
    std::string name;
    std::vector<int> ranks;
    int instance = 0;
    auto operator<=>(const Group&) const = default;
  };
  struct Operation {
    std::string name, state, dtype;
    std::vector<std::int64_t> shape;
    bool communicates = false, waited = false;
    std::size_t group = 0;  ///< of `groups`
    std::uint64_t sequence = 0;
    int peer = -1;               ///< rank in the group
    double queued = 0, end = 0;  ///< Unix seconds; end 0: it has not ended
    bool done() const { return state == "done"; }
    bool collective() const { return communicates && peer < 0 && name != "exchange"; }
  };

  int rank = 0, world_size = 1;
  std::string why, call;  ///< the open call; empty: none
  double taken = 0, call_begin = 0;
  std::vector<Group> groups;
  std::vector<Operation> operations;
};

/// Errors: DataError naming the file.
FlightDump read_flight(const std::filesystem::path& file);

}  // namespace tessera
