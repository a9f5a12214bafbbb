#include "tessera/nn/bodies.hpp"

#include <algorithm>

#include "nn/models/bert.hpp"
#include "nn/models/t5.hpp"
#include "tessera/base/families.hpp"
#include "tessera/nn/models/decoder.hpp"

namespace tessera {
namespace {

template <typename M>
std::unique_ptr<Model> build(const ModelConfig& config, const Numerics& numerics, const Sharding& sharding) {
  return std::make_unique<M>(config, numerics, sharding);
}

constexpr Body kBodies[] = {{"decoder", build<Decoder>},
                            {"bert", build_bert},
                            {"megatron-bert", build_megatron_bert},
                            {"t5", build_t5},
                            {"megatron_t5", build_megatron_t5}};

}  // namespace

std::span<const Body> bodies() { return kBodies; }

std::unique_ptr<Model> make_model(const ModelConfig& config, const Numerics& numerics,
                                  const Sharding& sharding) {
  const std::string_view name = spec_of(config.family).body;
  const auto body = std::ranges::find(kBodies, name, &Body::name);
  TESSERA_ENSURE(InternalError, body != std::end(kBodies), "family '", config.family.name, "' has the body '",
                 name, "', which nobody builds");
  const std::string foreign = setting_of_others(config);
  TESSERA_ENSURE(ConfigError, foreign.empty(), foreign);
  return body->build(config, numerics, sharding);
}

}  // namespace tessera
