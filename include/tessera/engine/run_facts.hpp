#pragma once
/// What a run is, as lines to read before its first step.

#include <string>
#include <vector>

namespace tessera {

struct Config;

/// Parameters of each (tensor, pipeline) rank as Megatron prints them, and the parts of the vocabulary. Of
/// the model that the ranks would build, without building it; the layout is given.
std::vector<std::string> model_lines(const Config& config);

/// Micro-batches and total batch on `data_ranks`, optimizer, the learning rate's way.
std::vector<std::string> training_lines(const Config& config, int data_ranks);

}  // namespace tessera
