#include "tessera/engine/build.hpp"

#include "tessera/base/config_file.hpp"
#include "tessera/nn/models/decoder.hpp"

namespace tessera {

std::unique_ptr<Engine> build_engine(const Config& config, bool trainable) {
  EngineOptions options = EngineOptions::from(config);
  options.trainable = trainable;
  return std::make_unique<Engine>(
      std::make_unique<Decoder>(resolve(config.model), numerics_of(config.training)), options,
      ExecCtx::cpu(static_cast<int>(config.device.threads),
                   static_cast<std::uint64_t>(config.training.seed)));
}

}  // namespace tessera
