/// What passes of a stack read, unit by unit.

#include <algorithm>

#include "tessera/nn/stack.hpp"

namespace tessera {
namespace {

using Visits = std::vector<std::vector<std::size_t>>;

/// Entries [first, first + count) as one.
std::vector<std::size_t> together(const std::vector<std::size_t>& units, std::size_t first,
                                  std::size_t count) {
  const auto begin = units.begin() + static_cast<std::ptrdiff_t>(first);
  return {begin, begin + static_cast<std::ptrdiff_t>(count)};
}

bool holds(Module& module, const Parameter* parameter) {
  const std::vector<Parameter*> parameters = module.parameters();
  return std::ranges::find(parameters, parameter) != parameters.end();
}

}  // namespace

std::vector<Module*> Stack::parts() const {
  std::vector<Module*> parts;
  for (const Piece& piece : pieces_) {
    for (const Run& run : piece.runs) {
      if (run.front != nullptr) parts.push_back(run.front);
      parts.insert(parts.end(), run.layers.begin(), run.layers.end());
    }
    if (piece.head != nullptr) parts.push_back(piece.head);
  }
  return parts;
}

std::vector<std::vector<Parameter*>> Stack::units() {
  std::vector<std::vector<Parameter*>> units;
  std::vector<Parameter*> rest = parameters();
  for (Module* part : parts()) {
    units.push_back(part->parameters());
    for (const Parameter* p : units.back()) std::erase(rest, p);
  }
  units.push_back(std::move(rest));
  return units;
}

std::size_t Stack::segment(std::size_t first, std::size_t count) const {
  const RecomputeOptions& again = sharding_.recompute;
  const auto n = static_cast<std::size_t>(again.layers);
  return again.what == Recompute::full && again.method == RecomputeMethod::uniform
             ? std::min(n, count - first)
             : 1;
}

UnitOrder Stack::unit_order(int index) {
  const std::vector<Module*> parts = this->parts();
  const auto unit_of = [&](const Module* part) {
    return static_cast<std::size_t>(std::ranges::find(parts, part) - parts.begin());
  };
  UnitOrder order;
  const Piece& piece = piece_at(index);
  for (const Run& run : piece.runs) {
    if (run.front != nullptr) {
      order.forward.push_back({unit_of(run.front)});
      if (run.front->reads_weights_in_backward()) order.backward.push_back({unit_of(run.front)});
    }
    std::vector<std::size_t> layers;
    for (const Block* layer : run.layers) layers.push_back(unit_of(layer));
    for (const std::size_t unit : layers) order.forward.push_back({unit});
    for (std::size_t i = 0; i < layers.size(); i += segment(i, layers.size()))
      order.backward.push_back(together(layers, i, segment(i, layers.size())));
    if (sharding_.recompute.what != Recompute::selective) continue;
    for (const std::size_t unit : layers) order.weight_gradient.push_back({unit});
  }
  if (piece.head != nullptr) {
    std::vector<std::size_t> head{unit_of(piece.head)};
    const Parameter* const borrowed = piece.head->borrowed();
    for (std::size_t i = 0; borrowed != nullptr && i < parts.size(); ++i) {
      if (i != head[0] && holds(*parts[i], borrowed)) head.push_back(i);
    }
    order.forward.push_back(head);
    order.backward.push_back(head);
  }
  std::ranges::reverse(order.backward);
  std::ranges::reverse(order.weight_gradient);
  for (Visits* visits : {&order.forward, &order.backward, &order.weight_gradient}) {
    for (auto& visit : *visits) visit.push_back(parts.size());  // what belongs to no part
  }
  return order;
}

}  // namespace tessera
