#include <algorithm>

#include "engine/bytes_text.hpp"
#include "tessera/engine/plan.hpp"

namespace tessera {
namespace {

constexpr std::size_t kShownGroups = 4, kShownMembers = 16;
constexpr int kShownStages = 64;

using Row = std::vector<std::string>;

using detail::format;

/// Decimal units: 1 GB = 10^9 bytes. What two decimals would hide has three digits.
std::string gigabytes(std::int64_t bytes) {
  return format(bytes < 100'000'000 ? "%.3g" : "%.2f", static_cast<double>(bytes) / 1e9);
}

std::string grouped(std::int64_t value) {
  std::string digits = std::to_string(value);
  for (auto at = static_cast<std::ptrdiff_t>(digits.size()) - 3; at > 0; at -= 3)
    digits.insert(static_cast<std::size_t>(at), 1, ',');
  return digits;
}

/// Columns as wide as they must be; the first `left` of them begin at the left.
std::string table(const std::vector<Row>& rows, std::size_t left) {
  std::vector<std::size_t> widths;
  for (const Row& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const Row& row : rows) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) {
      const std::string space(widths[i] - row[i].size(), ' ');
      line += "  " + (i < left ? row[i] + space : space + row[i]);
    }
    while (line.back() == ' ') line.pop_back();
    text += line + "\n";
  }
  return text;
}

/// "embedding + 0-11", "12-23 + head".
std::string piece_text(const ModelPiece& piece) {
  std::string text = piece.embedding ? "embedding" : "";
  if (piece.num_layers > 0) {
    const std::int64_t last = piece.first_layer + piece.num_layers - 1;
    text += detail::concat(text.empty() ? "" : " + ", piece.first_layer);
    if (piece.num_layers > 1) text += detail::concat("-", last);
  }
  if (piece.head) text += text.empty() ? "head" : " + head";
  return text;
}

/// "selective", "full (block, 3 layers)".
std::string way_text(const RecomputeOptions& options) {
  std::string text(name_of(options.what));
  if (options.what != Recompute::full) return text;
  return text + detail::concat(" (", name_of(options.method), ", ", options.layers,
                               options.layers == 1 ? " layer)" : " layers)");
}

/// The rank of a stage that needs most memory.
const RankPlan& largest_of(const Plan& plan, int stage) {
  const RankPlan* found = nullptr;
  for (const RankPlan& rank : plan.ranks) {
    if (rank.at.pp == stage && (found == nullptr || rank.memory_bytes() > found->memory_bytes()))
      found = &rank;
  }
  return *found;
}

std::string summary(const Plan& plan) {
  const ParallelConfig& p = plan.config.parallel;
  const TrainingConfig& t = plan.config.training;
  std::string text = detail::concat("model      ", name_of(plan.config.model.family), ", ",
                                    plan.config.model.num_layers, " layers, ", plan.config.model.hidden_size,
                                    " wide, ", grouped(plan.parameters), " parameters\n");
  text += detail::concat("layout     ", plan.mesh.world(), " ranks: tensor ", p.tensor,
                         p.sequence && p.tensor > 1 ? " (sequence)" : "", " x pipeline ", p.pipeline,
                         p.context > 1 ? detail::concat(" x context ", p.context) : std::string(), " x data ",
                         *p.data, p.expert > 1 ? detail::concat(" (expert ", p.expert, ")") : std::string(),
                         ", zero_stage ", p.zero_stage, "\n");
  text += detail::concat("step       ", t.global_batch_size, " samples of ", lengths_text(plan.config), ": ",
                         plan.micro_batches, " micro-batches of ", t.micro_batch_size, " on each of ",
                         *p.data, " data ranks\n");
  text += detail::concat("numbers    ", name_of(t.precision),
                         t.precision != Precision::fp32 && t.fp32_residual ? ", residual stream fp32" : "",
                         ", recompute ", way_text(RecomputeOptions::from(t)), "\n");
  if (plan.recompute) text += "recompute  " + to_text(*plan.recompute) + "\n";
  return text;
}

std::string groups_text(const Plan& plan) {
  if (plan.groups.empty()) return {};
  std::vector<Row> rows;
  for (const RankGroups& axis : plan.groups) {
    std::string members;
    for (std::size_t i = 0; i < std::min(axis.groups.size(), kShownGroups); ++i) {
      const std::vector<int>& group = axis.groups[i];
      members += "[";
      for (std::size_t j = 0; j < std::min(group.size(), kShownMembers); ++j)
        members += detail::concat(j == 0 ? "" : " ", group[j]);
      members += group.size() > kShownMembers ? " ...] " : "] ";
    }
    if (axis.groups.size() > kShownGroups) members += detail::concat("... ", axis.groups.size(), " groups");
    rows.push_back({std::string(axis.axis), members});
  }
  return "\nGroups\n" + table(rows, 2);
}

std::string offload_text(const Plan& plan) {
  std::string text;
  const auto add = [&](const std::string& where, std::int64_t Elsewhere::*bytes) {
    std::int64_t most = 0, all = 0;
    for (const RankPlan& rank : plan.ranks) {
      most = std::max(most, rank.elsewhere.*bytes);
      all += rank.elsewhere.*bytes;
    }
    if (all > 0)
      text += detail::concat("  Offloaded ", where, ": ", bytes_text(most), " of a rank, ", bytes_text(all),
                             " of all.\n");
  };
  add("to host memory", &Elsewhere::host_bytes);
  add("to disk, in " + plan.config.offload.path.value_or(""), &Elsewhere::disk_bytes);
  std::int64_t in = 0, out = 0;
  for (const RankPlan& rank : plan.ranks) {
    in = std::max(in, rank.elsewhere.to_device);
    out = std::max(out, rank.elsewhere.to_host);
  }
  if (in + out > 0)
    text += detail::concat("  In a step ", bytes_text(in), " come to the device of a rank and ",
                           bytes_text(out), " leave it.\n");
  return text;
}

std::string memory_text(const Plan& plan) {
  const bool large = plan.largest().memory_bytes() >= 1'000'000'000;
  const auto amount = [&](std::int64_t bytes) {
    return format("%.2f", static_cast<double>(bytes) / (large ? 1e9 : 1e6));
  };
  std::vector<Row> rows{{"stage", "layers", "parameters", "weights", "gradients", "optimizer", "activations",
                         "in flight", "other", "total"}};
  for (int stage = 0; stage < plan.mesh.pp; ++stage) {
    const RankPlan& rank = largest_of(plan, stage);
    std::string layers;
    for (const ModelPiece& piece : rank.pieces) layers += (layers.empty() ? "" : "; ") + piece_text(piece);
    const std::int64_t weights = rank.memory_of("weights") + rank.memory_of("16-bit weights");
    const std::int64_t activations = rank.memory_of("activations");
    rows.push_back({std::to_string(stage), layers, grouped(rank.parameters), amount(weights),
                    amount(rank.memory_of("gradients")), amount(rank.memory_of("optimizer")),
                    amount(activations), std::to_string(rank.most_in_flight),
                    amount(rank.memory_bytes() - rank.persistent_bytes() - activations),
                    amount(rank.memory_bytes())});
  }
  return detail::concat("\nMemory of the largest rank of each stage, ",
                        large ? "GB (10^9 bytes)" : "MB (10^6 bytes)", "\n") +
         table(rows, 2) + offload_text(plan);
}

/// "all", "0", "0-2" or "0 3".
std::string stages_text(const std::vector<int>& stages, int count) {
  const int size = static_cast<int>(stages.size());
  if (size == count) return "all";
  if (size > 1 && stages.back() - stages.front() + 1 == size)
    return detail::concat(stages.front(), "-", stages.back());
  std::string text;
  for (const int stage : stages) text += detail::concat(text.empty() ? "" : " ", stage);
  return text;
}

std::string traffic_text(const Plan& plan) {
  struct Line {
    TrafficTerm most;
    std::vector<int> stages;
  };
  std::vector<Line> lines;
  for (const RankPlan& rank : plan.ranks) {
    for (const TrafficTerm& term : rank.traffic) {
      auto line = std::find_if(lines.begin(), lines.end(), [&](const Line& l) {
        return l.most.axis == term.axis && l.most.name == term.name;
      });
      if (line == lines.end()) line = lines.insert(lines.end(), Line{term, {}});
      line->most.bytes = std::max(line->most.bytes, term.bytes);
      // Ranks come stage by stage.
      if (line->stages.empty() || line->stages.back() != rank.at.pp) line->stages.push_back(rank.at.pp);
    }
  }
  if (lines.empty()) return {};
  std::stable_sort(lines.begin(), lines.end(),
                   [](const Line& a, const Line& b) { return a.most.axis < b.most.axis; });
  std::vector<Row> rows{{"axis", "what", "stages", "bytes"}};
  for (const Line& line : lines) {
    rows.push_back({std::string(line.most.axis), std::string(line.most.name),
                    stages_text(line.stages, plan.mesh.pp), bytes_text(line.most.bytes)});
  }
  return "\nSent by one rank in one step (the one that sends most)\n" + table(rows, 3);
}

std::string schedule_text(const Plan& plan, int width) {
  if (plan.mesh.pp == 1) return {};
  std::string text = "\nSchedule ";
  text +=
      plan.mesh.pp <= kShownStages
          ? to_picture(plan.schedule, plan.times, width)
          : detail::concat(name_of(plan.schedule.kind), ": ", plan.mesh.pp, " stages, ", plan.micro_batches,
                           " micro-batches, bubble ", format("%.1f", 100 * plan.bubble), " %\n");
  return text + "With pieces that all take the same time the bubble would be " +
         format("%.1f", 100 * plan.even_bubble) + " %.\n";
}

std::string verdict(const Plan& plan, std::int64_t memory_bytes) {
  const RankPlan& worst = plan.largest();
  const std::int64_t needed = worst.memory_bytes();
  if (needed <= memory_bytes) {
    return detail::concat("\nFits: the largest rank (", worst.rank, ", stage ", worst.at.pp, ") needs ",
                          gigabytes(needed), " of ", gigabytes(memory_bytes), " GB.\n");
  }
  const auto over = std::count_if(plan.ranks.begin(), plan.ranks.end(),
                                  [&](const RankPlan& rank) { return rank.memory_bytes() > memory_bytes; });
  std::string text = detail::concat(
      "\nDoes not fit: ", over, " of ", plan.ranks.size(), " ranks need more than ", gigabytes(memory_bytes),
      " GB; rank ", worst.rank, " (stage ", worst.at.pp, ") needs ", gigabytes(needed), " GB.\n");
  return text + advice_text(plan, memory_bytes) + "\n";
}

}  // namespace

std::string advice_text(const Plan& plan, std::int64_t memory_bytes) {
  const std::optional<PlanAdvice> advice = advise(plan, memory_bytes);
  if (!advice) return "No layout was found that fits. Use a smaller model or shorter sequences.";
  std::string text = "What fits:";
  for (const ConfigItem& change : advice->changes) text += " " + change.key + "=" + change.value;
  return text +
         detail::concat(" on ", advice->processes, " processes: ", gigabytes(advice->memory_bytes), " GB.");
}

std::string to_text(const RecomputeChoice& choice) {
  const std::string limit = detail::concat(bytes_text(choice.limit.bytes), " (", choice.limit.source, ")");
  const std::string way = way_text(choice.chosen.options);
  std::string text = choice.fits()
                         ? detail::concat("auto is ", way, ", the first that fits into ", limit)
                         : detail::concat("auto finds nothing that fits into ", limit, "; least needs ", way);
  const char* join = ": ";
  for (const RecomputeCandidate& tried : choice.tried) {
    text += join + way_text(tried.options) + " " + bytes_text(tried.memory_bytes);
    join = ", ";
  }
  return text;
}

std::string to_text(const Plan& plan, std::optional<std::int64_t> memory_bytes, int width) {
  std::string text =
      summary(plan) + groups_text(plan) + memory_text(plan) + traffic_text(plan) + schedule_text(plan, width);
  return memory_bytes ? text + verdict(plan, *memory_bytes) : text;
}

}  // namespace tessera
