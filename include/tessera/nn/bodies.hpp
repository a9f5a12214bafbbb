#pragma once
/// What the models of a family are made of. Rows of base/families.hpp are data; the body that a row names is
/// built here, and families whose blocks are alike share one.

#include <memory>
#include <span>
#include <string_view>

#include "tessera/base/config_model.hpp"
#include "tessera/nn/stack.hpp"

namespace tessera {

/// Builds what a rank holds of a model: blocks, head and loss. Errors: ConfigError for a sharding that does
/// not fit it.
using BuildBody = std::unique_ptr<Model> (*)(const ModelConfig& config, const Numerics& numerics,
                                             const Sharding& sharding);

struct Body {
  std::string_view name;  ///< as ModelSpec::body says it
  BuildBody build;
};

/// Every body there is.
std::span<const Body> bodies();

/// The model of a configuration, by the body of its family. Errors: as BuildBody.
std::unique_ptr<Model> make_model(const ModelConfig& config, const Numerics& numerics,
                                  const Sharding& sharding = {});

}  // namespace tessera
