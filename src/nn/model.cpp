#include "tessera/nn/model.hpp"

#include "tessera/autograd/functions.hpp"

namespace tessera {

Var Model::loss(const Forward& forward, const Tensor&) {
  return cross_entropy(forward.exec, this->forward(forward), forward.input.labels);
}

KvCache Model::make_cache(const ExecCtx&, std::int64_t, std::int64_t) const {
  throw InvalidArgument("this model has no KV cache: override Model::make_cache to generate text with it");
}

}  // namespace tessera
