#pragma once
/// New files of a model for a folder that also holds other things: they are complete in a folder inside of
/// it, whose rename to `.ready-model` decides the update; then they are moved one by one. Whoever finds that
/// folder can finish the moves, as often and with as many others as they like.

#include <filesystem>
#include <string>

namespace tessera::checkpoint_detail {

constexpr const char* kStagedUpdate = ".incomplete-update";
constexpr const char* kReadyUpdate = ".ready-model";

/// Whether a file of this name belongs to a saved model, so that one which the new model lacks goes.
bool is_model_file(const std::string& name);
/// Makes the files in `staging` (a folder on the same file system) those of the model in `dir`.
void update_in_place(const std::filesystem::path& staging, const std::filesystem::path& dir);
/// Carries out an update that was decided, if there is one. Errors: IoError.
void finish_update(const std::filesystem::path& dir);
/// Whether `dir` is a folder of plain files that can be exchanged with another: no folders in it, no mount
/// point, ours, and not where this process works.
bool is_exchangeable(const std::filesystem::path& dir);
/// Gives `staging` the files of `dir` that are no model's, and exchanges the two. False: the file system has
/// no exchange.
bool exchange_model(const std::filesystem::path& staging, const std::filesystem::path& dir);

}  // namespace tessera::checkpoint_detail
