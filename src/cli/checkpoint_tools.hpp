#pragma once
/// The parts of `tessera checkpoint` that read every kind of checkpoint.

#include <string>

#include "cli/commands.hpp"

namespace tessera::cli {

/// Names, types and shapes of what lies at `path`, as a tree; numbered parts that are alike are printed once.
void print_tree(const std::string& path);

void add_checkpoint_diff(CLI::App& checkpoint, Program& program);
void add_checkpoint_average(CLI::App& checkpoint);

}  // namespace tessera::cli
