#pragma once
/// Weights of Hugging Face folders, or of folders `tessera convert` made, in and out of an engine.

#include <filesystem>

#include "tessera/checkpoint/hf.hpp"
#include "tessera/engine/engine.hpp"
#include "tessera/engine/weight_fit.hpp"

namespace tessera {

/// Errors: CheckpointError listing in which keys `stored`, found in `origin`, is another model than
/// `config`; dropout and initialisation may differ, and `config` may have a head for classes of samples that
/// takes the place of the stored model's.
void check_same_model(const ModelConfig& config, const ModelConfig& stored, const std::string& origin);

/// Puts what fits of a model's weights into `engine`: each rank reads the boxes it holds. Collective over the
/// engine's ranks; an error of one of them is one on all.
void load_weights(const HfModel& model, const WeightFit& fit, Engine& engine);

/// Puts a folder's weights into `engine`, whose decoder has the configuration `config`. With
/// `config.reinitialize` the folder may hold another model; so may it where a head for classes is new. The
/// result says what of it fits. Collective, likewise. Errors: those of check_same_model and open_model;
/// CheckpointError where nothing fits.
WeightFit load_pretrained(const std::filesystem::path& folder, const ModelConfig& config, Engine& engine);

/// Puts `whole`, the host's fp32 values of one parameter under Tessera's name, into this rank's part of it.
/// After the last of them: Weights::gather. Errors: InvalidArgument for another shape.
void load_parameter(Engine& engine, const std::string& name, const Tensor& whole);

/// The fp32 weights of an engine as a source for export_hf or export_tessera. `engine` must outlive it.
ViewSource weights_of(Engine& engine);

}  // namespace tessera
