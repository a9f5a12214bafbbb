#include "tessera/nn/model.hpp"

#include "tessera/parallel/functions.hpp"

namespace tessera {

Var Model::loss(const Forward& forward, const Tensor&) {
  return cross_entropy(forward.exec, this->forward(forward), forward.input.labels);
}

std::vector<Var> Model::run_piece(const Forward& forward, int piece, const std::vector<Var>& inputs,
                                  Output output, const Tensor& upstream) {
  TESSERA_CHECK(piece == 0 && inputs.empty(),
                "this model is one piece: override Model::run_piece to train it in a pipeline");
  return {output == Output::losses ? loss(forward, upstream) : this->forward(forward)};
}

std::vector<std::vector<Parameter*>> Model::units() { return {parameters()}; }

UnitOrder Model::unit_order(int) { return {{{0}}, {{0}}, {{0}}}; }

void Model::check_length(std::int64_t seq_length) const {
  if (seq_length > max_positions())
    throw InvalidArgument(detail::concat("a sequence of ", seq_length, " tokens is longer than the model's ",
                                         max_positions(), " positions; cut the samples"));
}

std::vector<Port> Model::inputs(int, const MicroBatchSize&) const {
  throw InvalidArgument("this model is one piece: override Model::inputs to train it in a pipeline");
}

std::vector<Port> Model::outputs(int, const MicroBatchSize&) const {
  throw InvalidArgument("this model is one piece: override Model::outputs to train it in a pipeline");
}

KvCache Model::make_cache(const ExecCtx&, std::int64_t, std::int64_t, std::int64_t) const {
  check_generates(0);
  return {};
}

void Model::check_generates(std::int64_t) const {
  throw InvalidArgument(
      "this model has no KV cache: override Model::make_cache and Model::check_generates to generate text "
      "with "
      "it");
}

}  // namespace tessera
