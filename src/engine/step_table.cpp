#include <algorithm>
#include <cstdio>
#include <map>

#include "tessera/engine/profile.hpp"

namespace tessera {
namespace {

/// How much of a stretch of time lies in one of the steps.
double covered(std::span<const TimedStep> steps, double begin_s, double end_s) {
  double sum = 0;
  for (const TimedStep& step : steps)
    sum += std::max(0.0, std::min(end_s, step.end_s) - std::max(begin_s, step.begin_s));
  return sum;
}

bool begins_in_a_step(std::span<const TimedStep> steps, const TimedWork& work) {
  return std::any_of(steps.begin(), steps.end(), [&](const TimedStep& step) {
    return work.begin_s >= step.begin_s && work.begin_s < step.end_s;
  });
}

/// Time in the steps that is spent in each work itself, without what it encloses.
std::vector<double> own_seconds(const std::vector<TimedWork>& work, std::span<const TimedStep> steps) {
  std::vector<double> own(work.size());
  std::vector<std::size_t> open;  // each encloses the next
  for (std::size_t i = 0; i < work.size(); ++i) {
    while (!open.empty() && work[open.back()].end_s <= work[i].begin_s) open.pop_back();
    own[i] = covered(steps, work[i].begin_s, work[i].end_s);
    if (!open.empty()) own[open.back()] -= own[i];
    open.push_back(i);
  }
  return own;
}

double floor_of(const Work& work, const DeviceRates& rates) {
  if (work.kind == WorkKind::communication) return 0;  // all of it can be hidden
  const double compute = rates.flops_per_s > 0 ? work.flops / rates.flops_per_s : 0;
  const double memory = rates.bytes_per_s > 0 ? work.bytes / rates.bytes_per_s : 0;
  return std::max(compute, memory);
}

/// Of communication the rank's own lane has what it waited for.
std::string row_name(WorkKind kind) {
  return kind == WorkKind::communication ? "exposed communication" : std::string(name_of(kind));
}

void add(StepTable::Row& row, double seconds, double floor_s) {
  ++row.calls;
  row.seconds += seconds;
  row.floor_s += floor_s;
}

std::string line_of(const StepTable::Row& row, const StepTable& table) {
  const double steps = std::max(1, table.steps);
  char text[160], floor[48];
  std::snprintf(floor, sizeof floor, "%11s %11s", "-", "-");
  if (row.floor_s > 0) {
    std::snprintf(floor, sizeof floor, "%11.3f %11.2f", row.floor_s / steps * 1e3, row.seconds / row.floor_s);
  }
  char calls[24] = "";
  if (row.calls > 0) std::snprintf(calls, sizeof calls, "%.6g", static_cast<double>(row.calls) / steps);
  std::snprintf(text, sizeof text, "%-34s %8s %11.3f %8.1f %s\n", row.name.c_str(), calls,
                row.seconds / steps * 1e3, 100.0 * row.seconds / std::max(table.seconds, 1e-30), floor);
  return text;
}

std::string head(const char* name) {
  char text[160];
  std::snprintf(text, sizeof text, "%-34s %8s %11s %8s %11s %11s\n", name, "calls", "time ms", "share %",
                "floor ms", "time/floor");
  return text;
}

}  // namespace

StepTable make_step_table(const TraceLane& lane, std::span<const TimedStep> steps, const DeviceRates& rates) {
  StepTable table{.steps = static_cast<int>(steps.size())};
  for (const TimedStep& step : steps) table.seconds += step.end_s - step.begin_s;
  for (int kind = 0; kind < static_cast<int>(WorkKind::scope); ++kind)
    table.kinds.push_back({row_name(static_cast<WorkKind>(kind))});
  std::map<std::string, StepTable::Row> operations;
  const std::vector<double> own = own_seconds(lane.work, steps);
  double rest = table.seconds;
  for (std::size_t i = 0; i < lane.work.size(); ++i) {
    const Work& work = lane.work[i].work;
    if (work.kind == WorkKind::scope || !begins_in_a_step(steps, lane.work[i])) continue;
    const double floor_s = floor_of(work, rates);
    add(table.kinds[static_cast<std::size_t>(work.kind)], own[i], floor_s);
    StepTable::Row& row = operations[work.name];
    row.name = work.name;
    add(row, own[i], floor_s);
    rest -= own[i];
  }
  table.kinds.push_back({.name = "host, idle", .seconds = rest});
  for (auto& [name, row] : operations) table.operations.push_back(std::move(row));
  std::stable_sort(table.operations.begin(), table.operations.end(),
                   [](const auto& a, const auto& b) { return a.seconds > b.seconds; });
  return table;
}

std::string text_of(const StepTable& table) {
  std::string text = head("kind");
  StepTable::Row total{.name = "TOTAL"};
  for (const StepTable::Row& row : table.kinds) {
    text += line_of(row, table);
    total.calls += row.calls;
    total.seconds += row.seconds;
    total.floor_s += row.floor_s;
  }
  text += line_of(total, table) + "\n" + head("operation");
  for (const StepTable::Row& row : table.operations) text += line_of(row, table);
  return text;
}

}  // namespace tessera
