#include <algorithm>
#include <charconv>
#include <limits>
#include <numeric>
#include <string_view>

#include "tessera/base/error.hpp"
#include "tessera/pipeline/schedule.hpp"

namespace tessera {

namespace {

/// Layers are alike, so the best cut is found by handing them out one by one, each to where the cost after it
/// is least: exact for the largest cost, and for the sum of squares after it, because costs only grow. First
/// all stages get their share, then the pieces within each. Earlier stages and pieces win ties.
class Cutter {
 public:
  Cutter(const PartCosts& costs, const std::vector<int>& stage_of)
      : costs_(costs), stage_of_(stage_of), counts_(stage_of.size(), 1) {}

  std::vector<std::int64_t> cut(std::int64_t layers) {
    const int stages = *std::max_element(stage_of_.begin(), stage_of_.end()) + 1;
    std::vector<std::int64_t> extra(static_cast<std::size_t>(stages), 0);
    std::vector<double> loads(extra.size(), 0.0);
    for (std::size_t piece = 0; piece < counts_.size(); ++piece) {
      loads[static_cast<std::size_t>(stage_of_[piece])] += piece_cost(piece);
    }
    for (auto left = layers - static_cast<std::int64_t>(counts_.size()); left > 0; --left) {
      const std::size_t stage = least(loads);
      ++extra[stage];
      loads[stage] += costs_.layer;
    }
    for (std::size_t stage = 0; stage < extra.size(); ++stage) {
      for (std::int64_t k = 0; k < extra[stage]; ++k) ++counts_[lightest_piece(static_cast<int>(stage))];
    }
    return counts_;
  }

 private:
  static std::size_t least(const std::vector<double>& loads) {
    std::size_t best = 0;
    for (std::size_t i = 1; i < loads.size(); ++i) {
      // What differs only by rounding is a tie.
      if (loads[i] < loads[best] * (1 - 1e-12)) best = i;
    }
    return best;
  }
  double piece_cost(std::size_t piece) const {
    double cost = static_cast<double>(counts_[piece]) * costs_.layer;
    if (piece == 0) cost += costs_.embedding;
    if (piece + 1 == counts_.size()) cost += costs_.head;
    return cost;
  }
  std::size_t lightest_piece(int stage) const {
    std::size_t best = counts_.size();
    for (std::size_t piece = 0; piece < counts_.size(); ++piece) {
      if (stage_of_[piece] != stage) continue;
      if (best == counts_.size() || piece_cost(piece) < piece_cost(best) * (1 - 1e-12)) best = piece;
    }
    return best;
  }

  const PartCosts& costs_;
  const std::vector<int>& stage_of_;
  std::vector<std::int64_t> counts_;
};

/// Layers with costs of their own: of all cuts into `pieces` runs the one whose largest is least, and among
/// these the evenest; earlier pieces get more. By dynamic programming over the layers that the first pieces
/// take.
class UnlikeCutter {
 public:
  UnlikeCutter(const PartCosts& costs, std::size_t pieces)
      : costs_(costs), pieces_(pieces), layers_(costs.layers.size()), before_(1, 0.0) {
    for (const double cost : costs.layers) before_.push_back(before_.back() + cost);
  }

  std::vector<std::int64_t> cut() const {
    const double largest = best([](double a, double b) { return std::max(a, b); }, kNoBound).cost;
    // What differs only by rounding is a tie.
    const Table even = best([](double a, double b) { return a + b * b; }, largest * (1 + 1e-12));
    std::vector<std::int64_t> counts(pieces_);
    std::size_t end = layers_;
    for (std::size_t piece = pieces_; piece-- > 0;) {
      const std::size_t begin = even.begin[piece][end];
      counts[piece] = static_cast<std::int64_t>(end - begin);
      end = begin;
    }
    return counts;
  }

 private:
  static constexpr double kNoBound = std::numeric_limits<double>::infinity();
  struct Table {
    double cost = 0;
    std::vector<std::vector<std::size_t>> begin;  ///< of a piece that ends before a layer
  };

  double cost_of(std::size_t piece, std::size_t begin, std::size_t end) const {
    double cost = before_[end] - before_[begin];
    if (piece == 0) cost += costs_.embedding;
    if (piece + 1 == pieces_) cost += costs_.head;
    return cost;
  }
  template <typename Join>
  Table best(Join join, double bound) const {
    Table table{0, std::vector(pieces_, std::vector<std::size_t>(layers_ + 1, 0))};
    std::vector<double> so_far(layers_ + 1, kNoBound);
    so_far[0] = 0;
    for (std::size_t piece = 0; piece < pieces_; ++piece) {
      std::vector<double> next(layers_ + 1, kNoBound);
      for (std::size_t end = piece + 1; end <= layers_; ++end) {
        for (std::size_t begin = end; begin-- > piece;) {
          const double own = cost_of(piece, begin, end);
          if (own > bound || so_far[begin] == kNoBound) continue;
          const double joined = join(so_far[begin], own);
          if (joined >= next[end] * (1 - 1e-12)) {
            // Of equal ones the last piece is to be the shortest, which came first.
            continue;
          }
          next[end] = joined;
          table.begin[piece][end] = begin;
        }
      }
      so_far = std::move(next);
    }
    table.cost = so_far[layers_];
    return table;
  }

  const PartCosts& costs_;
  std::size_t pieces_, layers_;
  std::vector<double> before_;  ///< cost of all layers before one
};

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

std::vector<std::int64_t> read_layout(const std::string& layout, std::int64_t layers, int pieces) {
  std::vector<std::int64_t> counts;
  for (std::size_t begin = 0; begin <= layout.size();) {
    const std::size_t comma = std::min(layout.find(',', begin), layout.size());
    const std::string_view entry = trimmed(std::string_view(layout).substr(begin, comma - begin));
    std::int64_t count = -1;
    const auto read = std::from_chars(entry.data(), entry.data() + entry.size(), count);
    const bool whole = read.ec == std::errc() && read.ptr == entry.data() + entry.size();
    TESSERA_ENSURE(ConfigError, whole && count >= 0 && count <= layers, "parallel.pipeline_layout \"", layout,
                   "\": entry ", counts.size() + 1, " must be a number of layers from 0 to ", layers,
                   ", not \"", entry, "\"");
    counts.push_back(count);
    begin = comma + 1;
  }
  TESSERA_ENSURE(ConfigError, counts.size() == static_cast<std::size_t>(pieces),
                 "parallel.pipeline_layout \"", layout, "\" has ", counts.size(), " entries for ", pieces,
                 " pieces (pipeline stages times chunks per stage)");
  const std::int64_t sum = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  TESSERA_ENSURE(ConfigError, sum == layers, "parallel.pipeline_layout \"", layout, "\" adds up to ", sum,
                 " layers; the model has ", layers);
  for (std::size_t piece = 1; piece + 1 < counts.size(); ++piece) {
    TESSERA_ENSURE(
        ConfigError, counts[piece] > 0, "parallel.pipeline_layout \"", layout, "\": entry ", piece + 1,
        " leaves a piece without layers; only the first and the last, which hold the embedding and "
        "the head, may have none");
  }
  return counts;
}

std::vector<PieceLayers> cut(std::int64_t layers, const std::vector<int>& stage_of,
                             const std::optional<std::string>& layout, const PartCosts& costs) {
  const int pieces = static_cast<int>(stage_of.size());
  TESSERA_CHECK(pieces >= 1, "a model cannot be cut into ", pieces, " pieces");
  std::vector<std::int64_t> counts;
  if (layout) {
    counts = read_layout(*layout, layers, pieces);
  } else {
    TESSERA_ENSURE(ConfigError, layers >= pieces, "model.num_layers (", layers, ") is less than the ", pieces,
                   " pieces of the pipeline (pipeline stages times chunks per ",
                   "stage); use fewer of either");
    TESSERA_CHECK(costs.layers.empty() || static_cast<std::int64_t>(costs.layers.size()) == layers,
                  "costs of ", costs.layers.size(), " layers for ", layers);
    counts = costs.layers.empty() ? Cutter(costs, stage_of).cut(layers)
                                  : UnlikeCutter(costs, stage_of.size()).cut();
  }
  std::vector<PieceLayers> result;
  std::int64_t first = 0;
  for (const std::int64_t count : counts) {
    result.push_back({first, count, false, false});
    first += count;
  }
  result.front().embedding = true;
  result.back().head = true;
  return result;
}

}  // namespace

std::vector<PieceLayers> cut_layers(std::int64_t layers, int pieces, const std::optional<std::string>& layout,
                                    const PartCosts& costs) {
  TESSERA_CHECK(pieces >= 1, "a model cannot be cut into ", pieces, " pieces");
  std::vector<int> stage_of(static_cast<std::size_t>(pieces));
  std::iota(stage_of.begin(), stage_of.end(), 0);
  return cut(layers, stage_of, layout, costs);
}

std::vector<PieceLayers> cut_layers(std::int64_t layers, const Schedule& schedule,
                                    const std::optional<std::string>& layout, const PartCosts& costs) {
  std::vector<int> stage_of;
  for (int piece = 0; piece < schedule.pieces(); ++piece) stage_of.push_back(schedule.stage_of(piece));
  return cut(layers, stage_of, layout, costs);
}

}  // namespace tessera
