/// A whole file of torch.save: zip archive, pickle and storages. Every tensor of what is accepted can be
/// read.

#include "checkpoint/torch_file.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include "fuzz.hpp"
#include "tessera/base/error.hpp"
#include "tessera/checkpoint/megatron.hpp"

using namespace tessera;
using namespace tessera::checkpoint_detail;

namespace {

void read_tensors(const TorchFile& file, const PickleValue& value, int depth) {
  if (const auto tensor = file.tensor(value)) {
    if (tensor->numel() > 1 << 20) return;  // a tensor may be many times as large as its storage: stride 0
    std::vector<std::byte> bytes(static_cast<std::size_t>(tensor->numel()) * size_of(tensor->dtype));
    file.read(*tensor, bytes);
    return;
  }
  if (depth > 3) return;
  for (const auto& [key, each] : value.entries) read_tensors(file, *each, depth + 1);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const int memory = ::memfd_create("input", 0);
  static const std::string path = "/proc/self/fd/" + std::to_string(memory);
  fuzz::require(::ftruncate(memory, static_cast<off_t>(size)) == 0, "the file in memory has no room");
  fuzz::require(::pwrite(memory, data, size, 0) == static_cast<ssize_t>(size),
                "the file in memory is not written");
  fuzz::accepts<CheckpointError>([&] {
    const TorchFile file(path);
    read_tensors(file, file.root(), 0);
    torch_file_json(path);
  });
  return 0;
}
