#include "tessera/nn/model.hpp"

namespace tessera {

KvCache Model::make_cache(const ExecCtx&, std::int64_t, std::int64_t) const {
  throw InvalidArgument("this model has no KV cache: override Model::make_cache to generate text with it");
}

}  // namespace tessera
