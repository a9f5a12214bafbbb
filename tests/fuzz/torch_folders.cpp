/// Folders of Megatron and DeepSpeed whose files hold any pickles beside storages of 16 and 1024 floats: they
/// are read as a model or a run, or refused. An input is a byte for the form, the length of the first pickle
/// and two pickles.

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "checkpoint/torch_folders.hpp"
#include "checkpoint/zip_archive.hpp"
#include "fuzz.hpp"
#include "tessera/base/error.hpp"
#include "tessera/checkpoint/megatron.hpp"

using namespace tessera;
using namespace tessera::checkpoint_detail;

namespace {

namespace fs = std::filesystem;
using Bytes = std::span<const std::byte>;

constexpr std::int64_t kMostElements = 1
                                       << 16;  // a tensor may be many times as large as its storage: stride 0

/// A folder for each form; they go when the program ends.
struct Folders {
  fs::path root = fs::temp_directory_path() / ("tessera-fuzz-folders-" + std::to_string(::getpid()));

  Folders() {
    for (const char* each : {"weights/mp_rank_00", "run/mp_rank_00", "deepspeed/global_step3", "dist"})
      fs::create_directories(root / each);
    std::ofstream(root / "deepspeed/latest") << "global_step3";
    TorchPickle pickle;
    pickle.tensor(DType::f32, {2, 3});
    write_torch_file(root / "dist/__0_0.distcp", std::move(pickle),
                     [](std::size_t, const auto& append) { append(std::vector<std::byte>(24)); });
  }
  ~Folders() {
    std::error_code ignored;
    fs::remove_all(root, ignored);
  }
};

void write_file(const fs::path& path, Bytes pickle) {
  const auto text = [](std::string_view of) { return std::as_bytes(std::span(of)); };
  ZipWriter zip(path);
  zip.add("archive/data.pkl", pickle);
  zip.add("archive/byteorder", text("little"));
  zip.add("archive/data/0", std::vector<std::byte>(64));
  zip.add("archive/data/1", std::vector<std::byte>(4096));
  zip.add("archive/version", text("3\n"));
  zip.end_archive();
}

void read_model(const fs::path& folder) {
  const MegatronModel model = open_megatron(folder);
  for (const TensorSpec& spec : model.tensors()) {
    if (spec.shape.numel() > kMostElements) continue;
    std::vector<std::byte> bytes(spec.bytes());
    model.read(spec.name, bytes);
  }
}

void read_run(const fs::path& folder) {
  std::vector<std::string> notes;
  const auto run = open_megatron_run(folder, {}, notes);
  for (const TensorSpec& spec : run->parameters()) {
    if (spec.shape.numel() > kMostElements) continue;
    std::vector<float> values(static_cast<std::size_t>(spec.shape.numel()));
    for (const RunValue value : kRunValues)
      fuzz::accepts<CheckpointError>([&] { run->read(value, spec.name, values); });
  }
}

void read_deepspeed(const fs::path& folder, RunValue value) {
  TorchFacts facts;
  const auto storage = parts_of(deepspeed_tensors(folder, SymbolicLinks::refuse, facts, value), folder);
  for (const auto& entry : storage->entries()) {
    if (entry.shape.numel() > kMostElements) continue;
    std::vector<std::byte> bytes(static_cast<std::size_t>(entry.shape.numel()) * size_of(entry.dtype));
    storage->read_slice(entry.name, TensorSlice::whole(entry.shape), bytes);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Folders folders;
  if (size < 3) return 0;
  const Bytes rest = std::as_bytes(std::span(data, size)).subspan(3);
  const std::size_t length = std::min<std::size_t>(rest.size(), data[1] + 256u * data[2]);
  const Bytes first = rest.first(length), second = rest.subspan(length);
  const fs::path& root = folders.root;
  switch (data[0] % 5) {
    case 0:
      write_file(root / "weights/mp_rank_00/model_optim_rng.pt", first);
      fuzz::accepts<CheckpointError>([&] { read_model(root / "weights"); });
      break;
    case 1:
      write_file(root / "run/mp_rank_00/model_optim_rng.pt", first);
      fs::remove(root / "run/mp_rank_00/distrib_optim.pt");
      if (!second.empty()) write_file(root / "run/mp_rank_00/distrib_optim.pt", second);
      fuzz::accepts<CheckpointError>([&] { read_run(root / "run"); });
      break;
    case 2:
      write_file(root / "deepspeed/global_step3/mp_rank_00_model_states.pt", first);
      write_file(root / "deepspeed/global_step3/zero_pp_rank_0_mp_rank_00_optim_states.pt", second);
      for (const RunValue value : kRunValues)
        fuzz::accepts<CheckpointError>([&] { read_deepspeed(root / "deepspeed", value); });
      break;
    default:
      write_file(root / "dist/common.pt", first);
      std::ofstream(root / "dist/.metadata", std::ios::binary)
          .write(reinterpret_cast<const char*>(second.data()), static_cast<std::streamsize>(second.size()));
      if (data[0] % 5 == 3) {
        fuzz::accepts<CheckpointError>([&] { read_model(root / "dist"); });
      } else {
        fuzz::accepts<CheckpointError>([&] { read_run(root / "dist"); });
      }
  }
  return 0;
}
