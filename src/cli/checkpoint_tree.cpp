#include <algorithm>
#include <filesystem>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/checkpoint_tools.hpp"
#include "cli/run_path.hpp"
#include "tessera/checkpoint/checkpoint.hpp"
#include "tessera/checkpoint/hf.hpp"
#include "tessera/checkpoint/megatron.hpp"
#include "tessera/checkpoint/sharded.hpp"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

/// Parts of dotted names.
struct Node {
  std::string value{};  ///< "float32 [3, 5]" of a leaf
  std::vector<std::pair<std::string, Node>> children{};

  Node& child(const std::string& name) {
    const auto found = std::ranges::find(children, name, &std::pair<std::string, Node>::first);
    return found != children.end() ? found->second : children.emplace_back(name, Node{}).second;
  }
  friend bool operator==(const Node&, const Node&) = default;
};

void add(Node& root, const std::string& name, const std::string& value) {
  Node* at = &root;
  for (std::size_t begin = 0; begin <= name.size();) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    at = &at->child(name.substr(begin, end - begin));
    begin = end + 1;
  }
  at->value = value;
}

std::optional<std::int64_t> number(const std::string& name) {
  const bool digits = !name.empty() && name.size() < 10 &&
                      std::ranges::all_of(name, [](char c) { return c >= '0' && c <= '9'; });
  return digits ? std::optional(std::stoll(name)) : std::nullopt;
}

/// Numbers first, in their order, then what is left as it came.
void sort_numbers(Node& node) {
  std::ranges::stable_sort(node.children, [](const auto& a, const auto& b) {
    const auto x = number(a.first), y = number(b.first);
    return x && (!y || *x < *y);
  });
  for (auto& [name, child] : node.children) sort_numbers(child);
}

void print(const Node& node, const std::string& indent) {
  for (std::size_t i = 0; i < node.children.size();) {
    const auto& [name, child] = node.children[i];
    std::size_t last = i;
    while (number(name) && last + 1 < node.children.size() && node.children[last + 1].second == child &&
           number(node.children[last + 1].first) == *number(node.children[last].first) + 1)
      ++last;
    std::cout << indent << name;
    if (last > i) std::cout << "-" << node.children[last].first;
    if (!child.value.empty()) std::cout << "  " << child.value;
    std::cout << "\n";
    print(child, indent + "  ");
    i = last + 1;
  }
}

std::string text_of(DType dtype, const Shape& shape) { return detail::concat(dtype, " ", shape); }

/// What torch_file_json gives: names of tensors may have dots of their own.
void add_json(Node& node, const std::string& name, const Json& value) {
  if (value.is_object() && value.contains("tensor") && value.contains("shape"))
    return add(node, name, value["tensor"].get<std::string>() + " " + value["shape"].dump());
  if (value.is_object() && !value.empty()) {
    for (const auto& [key, each] : value.items()) add_json(node.child(name), key, each);
    return;
  }
  node.child(name).value = value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Node tree_of_torch(const fs::path& path) {
  Node root;
  const Json file = Json::parse(torch_file_json(path));
  if (!file.is_object()) {
    root.value = file.dump(-1, ' ', false, Json::error_handler_t::replace);
    return root;
  }
  for (const auto& [key, value] : file.items()) add_json(root, key, value);
  return root;
}

Node tree_of_entries(const std::vector<SafetensorsEntry>& entries) {
  Node root;
  for (const SafetensorsEntry& entry : entries) add(root, entry.name, text_of(entry.dtype, entry.shape));
  return root;
}

/// Every .pt below Megatron's folder, in the order of names.
std::vector<fs::path> torch_files(const fs::path& folder) {
  std::vector<fs::path> files;
  std::error_code error;
  for (auto it = fs::recursive_directory_iterator(folder, error);
       !error && it != fs::recursive_directory_iterator(); it.increment(error)) {
    if (it->path().extension() == ".pt" && it->is_regular_file()) files.push_back(it->path());
  }
  TESSERA_ENSURE(CheckpointError, !error, folder.string(), ": cannot be read: ", error.message());
  std::ranges::sort(files);
  return files;
}

void print_one(Node root, const std::string& title) {
  sort_numbers(root);
  std::cout << title << (root.value.empty() ? "" : "  " + root.value) << "\n";
  print(root, "  ");
  std::cout << std::flush;
}

}  // namespace

void print_tree(const std::string& path) {
  if (path.ends_with(".pt") || path.ends_with(".bin")) return print_one(tree_of_torch(path), path);
  if (path.ends_with(".safetensors"))
    return print_one(tree_of_entries(SafetensorsReader(path).entries()), path);
  TESSERA_ENSURE(CheckpointError, fs::is_directory(path), path, ": there is no such folder. Check the path.");
  if (is_model_folder(path)) return print_one(tree_of_entries(ShardedReader(path).entries()), path);
  if (const auto files = torch_files(path); !files.empty()) {
    for (const fs::path& file : files) print_one(tree_of_torch(file), file.string());
    return;
  }
  const CheckpointSummary summary = inspect_checkpoint(checkpoint_in(path));
  Node root;
  for (const auto& tensor : summary.manifest.tensors)
    add(root, tensor.name, detail::concat(text_of(tensor.dtype, tensor.shape), "  ", tensor.placement));
  print_one(std::move(root), summary.dir.string());
}

}  // namespace tessera::cli
