/// The .metadata of a distributed checkpoint of PyTorch beside one file with a tensor: what it says of
/// tensors is held against that file, and every element of what is accepted can be read.

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "checkpoint/torch_folders.hpp"
#include "fuzz.hpp"
#include "tessera/base/error.hpp"

using namespace tessera;
using namespace tessera::checkpoint_detail;

namespace {

namespace fs = std::filesystem;

/// A folder with __0_0.distcp, a float32 tensor [2, 3]; it goes when the program ends.
struct Folder {
  fs::path path = fs::temp_directory_path() / ("tessera-fuzz-" + std::to_string(::getpid()));

  Folder() {
    fs::create_directories(path);
    TorchPickle pickle;
    pickle.tensor(DType::f32, {2, 3});
    write_torch_file(path / "__0_0.distcp", std::move(pickle),
                     [](std::size_t, const auto& append) { append(std::vector<std::byte>(24)); });
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
};

void read_all(const fs::path& folder, RunValue value) {
  TorchFacts facts;
  const auto storage = parts_of(dcp_tensors(folder, SymbolicLinks::refuse, facts, value), folder);
  for (const auto& entry : storage->entries()) {
    if (entry.shape.numel() > 1 << 20)
      continue;  // a tensor may be many times as large as its storage: stride 0
    std::vector<std::byte> bytes(static_cast<std::size_t>(entry.shape.numel()) * size_of(entry.dtype));
    storage->read_slice(entry.name, TensorSlice::whole(entry.shape), bytes);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Folder folder;
  std::ofstream(folder.path / ".metadata", std::ios::binary)
      .write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(size));
  for (const RunValue value : {RunValue::weight, RunValue::exp_avg})
    fuzz::accepts<CheckpointError>([&] { read_all(folder.path, value); });
  return 0;
}
