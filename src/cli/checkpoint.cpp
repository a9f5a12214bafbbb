#include "tessera/checkpoint/checkpoint.hpp"

#include <cstdio>
#include <iostream>
#include <memory>

#include "cli/checkpoint_tools.hpp"
#include "cli/commands.hpp"
#include "cli/run_path.hpp"
#include "tessera/checkpoint/megatron.hpp"

namespace tessera::cli {
namespace {

void inspect(const std::string& path, bool tree) {
  if (tree) return print_tree(path);
  if (path.ends_with(".pt") || path.ends_with(".bin")) {
    std::cout << torch_file_json(path) << "\n";
    return;
  }
  const CheckpointSummary s = inspect_checkpoint(checkpoint_in(path));
  std::cout << s.dir.string() << "\n  step " << s.manifest.state.step << ", "
            << s.manifest.state.consumed_samples << " samples, tessera " << s.manifest.state.tessera_version
            << "\n  " << s.manifest.files.size() << " file(s), " << s.bytes << " bytes\n";
  for (const auto& file : s.manifest.files)
    std::cout << "    " << file.name << "  " << file.bytes << " bytes\n";
  for (const auto& group : s.groups) {
    std::cout << "  " << group.prefix << ": " << group.tensors << " tensors, " << group.elements
              << " values, " << group.bytes << " bytes\n";
  }
  for (const auto& tensor : s.manifest.tensors) {
    std::cout << "    " << tensor.name << "  " << tensor.dtype << " " << tensor.shape << "  "
              << tensor.placement << "\n";
  }
}

/// A single checkpoint, or all of a run: a damaged newest one must not hide behind the one before it.
void verify(const std::string& path, Program& program) {
  const std::filesystem::path folder = checkpoint_folder(path);
  TESSERA_ENSURE(CheckpointError, std::filesystem::is_directory(folder), folder.string(),
                 ": there is no such folder. Check the path.");
  std::vector<std::filesystem::path> checkpoints;
  for (const std::int64_t step : list_checkpoints(folder))
    checkpoints.push_back(folder / checkpoint_name(step));
  if (checkpoints.empty()) checkpoints.push_back(folder);
  for (const std::filesystem::path& dir : checkpoints) {
    const auto problems = verify_checkpoint(dir);
    for (const std::string& problem : problems) std::cout << problem << "\n";
    std::cout << dir.string() << ": " << (problems.empty() ? "every byte is as it was saved" : "damaged")
              << std::endl;
    if (!problems.empty()) program.exit_code = 4;
  }
}

}  // namespace

void add_checkpoint(CLI::App& app, Program& program) {
  auto* command = app.add_subcommand("checkpoint", "Look at, check, compare and average saved checkpoints");
  command->require_subcommand(1);
  auto path = std::make_shared<std::string>();
  const char* what = "a run's folder, a folder of checkpoints, or one checkpoint";
  auto* show = command->add_subcommand("inspect", "List what a checkpoint holds");
  show->add_option("path", *path, std::string(what) + "; or a file of torch.save (.pt, .bin)")->required();
  auto tree = std::make_shared<bool>(false);
  show->add_flag(
      "--tree", *tree,
      "names and shapes as a tree, equal layers once; also of model folders, .safetensors and Megatron's");
  show->callback([path, tree] { inspect(*path, *tree); });
  auto* check = command->add_subcommand("verify", "Read every byte and compare with the checksums");
  check->add_option("path", *path, what)->required();
  check->callback([path, &program] { verify(*path, program); });
  add_checkpoint_diff(*command, program);
  add_checkpoint_average(*command);
}

}  // namespace tessera::cli
