/// A pickle, as data.pkl of a file of torch.save: it is read as plain data or refused.

#include "checkpoint/pickle.hpp"

#include "checkpoint/megatron_args.hpp"
#include "fuzz.hpp"
#include "tessera/base/error.hpp"

using namespace tessera;
using namespace tessera::checkpoint_detail;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span bytes(reinterpret_cast<const std::byte*>(data), size);
  std::optional<Pickle> pickle;
  if (!fuzz::accepts<CheckpointError>([&] { pickle.emplace(bytes, "input"); })) return 0;
  const PickleValue* args = pickle->root().find("args");
  fuzz::accepts<CheckpointError>([&] { read_megatron_args(args ? *args : pickle->root(), "input"); });
  return 0;
}
