#pragma once
/// How Megatron trains (arguments, and the state of its schedule) and Tessera's sections for the same, both
/// ways.

#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/torch_file.hpp"
#include "tessera/checkpoint/run_source.hpp"

namespace tessera::checkpoint_detail {

struct MegatronTraining {
  Settings settings;     ///< all sections but the model and the layout
  RunCounters counters;  ///< but for what the optimizer's state says
};
/// `root`: what a rank's file holds; what is not taken over is said in `notes`. Errors: CheckpointError
/// naming the argument that Tessera has nothing for, or that contradicts another one.
MegatronTraining read_megatron_training(const PickleValue& root, const std::filesystem::path& file,
                                        std::vector<std::string>& notes);
/// Checks that the schedule has come as far as `updates` say, once these are known.
void check_schedule(const PickleValue& root, const std::filesystem::path& file, const Config& config,
                    const RunCounters& counters);

/// Writes the arguments into a namespace that is open.
void write_training_args(TorchPickle& pickle, const Config& config, const RunCounters& counters);
/// Writes the schedule's state, as the value of a key.
void write_schedule(TorchPickle& pickle, const Config& config, const RunCounters& counters);

}  // namespace tessera::checkpoint_detail
