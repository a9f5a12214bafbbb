#include <algorithm>
#include <cmath>
#include <cstdio>

#include "pipeline/label.hpp"
#include "tessera/base/error.hpp"
#include "tessera/pipeline/schedule.hpp"

namespace tessera {

namespace {

/// a, b, ..., z, aa, ab, ...
std::string chunk_letters(int chunk) {
  std::string letters;
  for (int rest = chunk; rest >= 0; rest = rest / 26 - 1) {
    letters += static_cast<char>('a' + rest % 26);
  }
  std::reverse(letters.begin(), letters.end());
  return letters;
}

std::size_t longest_label(const Schedule& schedule) {
  std::size_t longest = 1;
  for (const auto& column : schedule.actions) {
    for (const Action& action : column) {
      longest = std::max(longest, label_of(action, schedule.chunks).size());
    }
  }
  return longest;
}

double shortest_pass(const Simulation& simulation) {
  double shortest = simulation.makespan;
  for (const TimedAction& timed : simulation.actions) {
    if (timed.end > timed.begin) shortest = std::min(shortest, timed.end - timed.begin);
  }
  return shortest;
}

/// Columns of text per unit of time: a whole number for the shortest pass while that fits, and not more than
/// labels need.
double columns_per_unit(const Schedule& schedule, const Simulation& simulation, int columns) {
  if (simulation.makespan <= 0.0) return 0.0;
  const double shortest = shortest_pass(simulation);
  const double most = static_cast<double>(longest_label(schedule)) + 1.0;
  const double whole = std::min(std::floor(columns * shortest / simulation.makespan + 1e-9), most);
  return whole >= 1.0 ? whole / shortest : columns / simulation.makespan;
}

/// A pass in `width` characters: its label if that leaves a space, else its letter all over.
std::string cell(const Action& action, int chunks, std::size_t width) {
  std::string text = label_of(action, chunks);
  if (text.size() < width) {
    text.resize(width, ' ');
  } else {
    text.assign(width, letter_of(action.kind));
  }
  return text;
}

}  // namespace

char letter_of(Action::Kind kind) {
  if (kind == Action::Kind::forward) return 'F';
  return kind == Action::Kind::weight_gradient ? 'W' : 'B';
}

std::string label_of(const Action& action, int chunks) {
  std::string label(1, letter_of(action.kind));
  label += std::to_string(action.micro_batch);
  if (chunks > 1 && action.chunk >= 0) label += chunk_letters(action.chunk);
  return label;
}

std::string title_of(const Schedule& schedule, const Simulation& simulation) {
  char bubble[32];
  std::snprintf(bubble, sizeof bubble, "%.1f", 100.0 * simulation.bubble);
  const auto count = [](int n, const char* one, const char* many) {
    return std::to_string(n) + " " + (n == 1 ? one : many);
  };
  std::string title(name_of(schedule.kind));
  title += ": " + count(schedule.stages, "stage", "stages");
  if (schedule.chunks > 1) title += ", " + count(schedule.chunks, "chunk", "chunks") + " each";
  title += ", " + count(schedule.micro_batches, "micro-batch", "micro-batches");
  return title + ", bubble " + bubble + " %";
}

std::string to_text(const Schedule& schedule) {
  std::string text;
  for (const auto& column : schedule.actions) {
    for (std::size_t i = 0; i < column.size(); ++i) {
      if (i > 0) text += ' ';
      text += label_of(column[i], schedule.chunks);
    }
    text += '\n';
  }
  return text;
}

std::string to_picture(const Schedule& schedule, const std::vector<PassTimes>& times, int width) {
  const Simulation simulation = simulate(schedule, times);
  const std::size_t digits = std::to_string(schedule.stages - 1).size();
  const std::string held_title = "held";
  const int margins = static_cast<int>(std::string("stage  |").size() + digits + 2 + held_title.size());
  const int columns = width - margins;
  TESSERA_CHECK(columns >= 8, "a picture needs at least ", margins + 8, " columns, not ", width);

  const double scale = columns_per_unit(schedule, simulation, columns);
  const auto column_of = [&](double time) { return static_cast<std::size_t>(std::lround(time * scale)); };
  const std::size_t used = column_of(simulation.makespan);
  std::vector<std::string> rows(schedule.actions.size(), std::string(used, '.'));
  for (const TimedAction& timed : simulation.actions) {
    const std::size_t begin = column_of(timed.begin), end = column_of(timed.end);
    rows[static_cast<std::size_t>(timed.stage)].replace(begin, end - begin,
                                                        cell(timed.action, schedule.chunks, end - begin));
  }

  std::string picture = title_of(schedule, simulation) + "\n";
  picture += std::string(static_cast<std::size_t>(margins) - 2 - held_title.size() + used + 2, ' ') +
             held_title + "\n";
  for (std::size_t stage = 0; stage < rows.size(); ++stage) {
    const std::string number = std::to_string(stage);
    picture += "stage " + std::string(digits - number.size(), ' ') + number + " |" + rows[stage] + "| " +
               std::to_string(simulation.most_in_flight[stage]) + "\n";
  }
  picture += "F forward, B backward, W weight gradient, . idle; held: the most activations at once";
  if (schedule.chunks > 1) picture += "; letters: chunks of a stage";
  return picture + "\n";
}

}  // namespace tessera
