#include <iostream>
#include <memory>

#include "cli/commands.hpp"
#include "tessera/engine/watchdog.hpp"

namespace tessera::cli {

void add_flight(CLI::App& app, Program&) {
  auto* command = app.add_subcommand(
      "flight", "Compare what the ranks of a run that hung were doing, and name the one behind");
  auto path = std::make_shared<std::string>();
  command->add_option("run", *path, "a run's folder, or a folder with dumps (rank-N.json)")->required();
  command->callback([path] { std::cout << compare_flights(*path) << std::flush; });
}

}  // namespace tessera::cli
