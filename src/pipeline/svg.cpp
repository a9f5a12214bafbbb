#include <algorithm>
#include <cmath>
#include <cstdio>

#include "pipeline/label.hpp"
#include "tessera/base/error.hpp"
#include "tessera/pipeline/schedule.hpp"

namespace tessera {

namespace {

using Kind = Action::Kind;

constexpr double kLeft = 80, kRight = 70, kTop = 78, kRow = 30, kBar = 24, kAxis = 50;
constexpr double kCharacter = 6.2;  // width of a label's character at its font size

struct KindStyle {
  Kind kind;
  const char* meaning;
  int red, green, blue;
};
constexpr KindStyle kStyles[] = {
    {Kind::forward, "F: forward", 86, 148, 214},
    {Kind::backward, "B: backward", 104, 172, 116},
    {Kind::input_gradient, "B: input gradient", 104, 172, 116},
    {Kind::weight_gradient, "W: weight gradient", 226, 156, 74},
};

const KindStyle& style_of(Kind kind) {
  return *std::find_if(std::begin(kStyles), std::end(kStyles),
                       [&](const KindStyle& style) { return style.kind == kind; });
}

/// Later chunks are lighter.
std::string colour(const KindStyle& style, int chunk, int chunks) {
  const double lighter = chunks > 1 ? 0.6 * chunk / (chunks - 1) : 0.0;
  const auto mix = [&](int value) { return static_cast<int>(std::lround(value + (255 - value) * lighter)); };
  char text[8];
  std::snprintf(text, sizeof text, "#%02x%02x%02x", mix(style.red), mix(style.green), mix(style.blue));
  return text;
}

std::string number(double value) {
  char text[48];
  std::snprintf(text, sizeof text, "%.2f", value);
  std::string shortened(text);
  shortened.erase(shortened.find_last_not_of('0') + 1);
  if (shortened.back() == '.') shortened.pop_back();
  return shortened;
}

class Drawing {
 public:
  void line(double x1, double y1, double x2, double y2, const char* colour) {
    body_ += detail::concat("<line x1=\"", number(x1), "\" y1=\"", number(y1), "\" x2=\"", number(x2),
                            "\" y2=\"", number(y2), "\" stroke=\"", colour, "\"/>\n");
  }
  /// `tip` is shown by a viewer when the mouse is over the bar.
  void bar(double x, double y, double width, double height, const std::string& fill, const std::string& tip) {
    body_ += detail::concat("<rect x=\"", number(x), "\" y=\"", number(y), "\" width=\"", number(width),
                            "\" height=\"", number(height), "\" fill=\"", fill,
                            "\" stroke=\"#ffffff\" stroke-width=\"0.5\">");
    if (!tip.empty()) body_ += "<title>" + tip + "</title>";
    body_ += "</rect>\n";
  }
  void text(double x, double y, const char* anchor, const std::string& words, int size = 12) {
    body_ += detail::concat("<text x=\"", number(x), "\" y=\"", number(y), "\" text-anchor=\"", anchor,
                            "\" font-size=\"", size, "\">", words, "</text>\n");
  }
  std::string finish(double width, double height) const {
    return detail::concat(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"", number(width), "\" height=\"", number(height),
        "\" viewBox=\"0 0 ", number(width), " ", number(height),
        "\" font-family=\"sans-serif\" fill=\"#222222\">\n<rect width=\"100%\" height=\"100%\" "
        "fill=\"#ffffff\"/>\n",
        body_, "</svg>\n");
  }

 private:
  std::string body_;
};

/// 1, 2 or 5 times a power of ten, so that about `wanted` steps make `length`.
double tick_step(double length, double wanted) {
  const double raw = length / wanted;
  const double power = std::pow(10.0, std::floor(std::log10(raw)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= raw * (1 - 1e-9)) return factor * power;
  }
  return 10.0 * power;
}

void draw_legend(Drawing& drawing, const Schedule& schedule) {
  double x = kLeft;
  for (const KindStyle& style : kStyles) {
    const bool used = std::any_of(schedule.actions.begin(), schedule.actions.end(), [&](const auto& column) {
      return std::any_of(column.begin(), column.end(), [&](const Action& a) { return a.kind == style.kind; });
    });
    if (!used) continue;
    for (int chunk = 0; chunk < schedule.chunks && chunk < 8; ++chunk) {
      drawing.bar(x, 42, 14, 14, colour(style, chunk, schedule.chunks), "");
      x += 15;
    }
    drawing.text(x + 4, 54, "start", style.meaning);
    x += 16 + kCharacter * static_cast<double>(std::string(style.meaning).size());
  }
  if (schedule.chunks > 1) drawing.text(x, 54, "start", "(lighter: later chunks of the stage)");
}

void draw_axis(Drawing& drawing, double makespan, double scale, double bottom) {
  drawing.line(kLeft, bottom, kLeft + makespan * scale, bottom, "#222222");
  if (makespan <= 0.0) return;
  const double step = tick_step(makespan, std::max(2.0, makespan * scale / 90.0));
  for (int k = 0; k * step <= makespan * (1 + 1e-9); ++k) {
    const double x = kLeft + k * step * scale;
    drawing.line(x, bottom, x, bottom + 5, "#222222");
    drawing.text(x, bottom + 18, "middle", detail::concat(k * step));
  }
  drawing.text(kLeft + makespan * scale / 2, bottom + 38, "middle", "time, in % of the step");
}

}  // namespace

std::string to_svg(const Schedule& schedule, const std::vector<PassTimes>& times) {
  const Simulation simulation = simulate(schedule, times);
  double shortest = simulation.makespan;
  for (const TimedAction& timed : simulation.actions) {
    if (timed.end > timed.begin) shortest = std::min(shortest, timed.end - timed.begin);
  }
  // Wide enough for labels in the shortest passes, within reason.
  const double wanted = simulation.makespan > 0.0 ? 26.0 * simulation.makespan / shortest : 0.0;
  const double plot = std::clamp(wanted, 720.0, 2400.0);
  const double scale = simulation.makespan > 0.0 ? plot / simulation.makespan : 0.0;
  const double percent = simulation.makespan > 0.0 ? 100.0 / simulation.makespan : 0.0;
  const double bottom = kTop + kRow * schedule.stages;

  Drawing drawing;
  drawing.text(kLeft, 26, "start", title_of(schedule, simulation), 16);
  draw_legend(drawing, schedule);
  drawing.text(kLeft + plot + 10, kTop - 6, "start", "held");
  for (int stage = 0; stage < schedule.stages; ++stage) {
    const double y = kTop + kRow * stage + kBar / 2 + 4;
    drawing.text(kLeft - 8, y, "end", "stage " + std::to_string(stage));
    drawing.text(kLeft + plot + 10, y, "start",
                 std::to_string(simulation.most_in_flight[static_cast<std::size_t>(stage)]));
    drawing.bar(kLeft, kTop + kRow * stage, plot, kBar, "#eeeeee", "");
  }
  for (const TimedAction& timed : simulation.actions) {
    const double x = kLeft + timed.begin * scale, y = kTop + kRow * timed.stage;
    const double width = (timed.end - timed.begin) * scale;
    const std::string label = label_of(timed.action, schedule.chunks);
    drawing.bar(x, y, width, kBar, colour(style_of(timed.action.kind), timed.action.chunk, schedule.chunks),
                detail::concat(label, ", ", number(timed.begin * percent), " to ",
                               number(timed.end * percent), " %"));
    if (kCharacter * static_cast<double>(label.size()) < width) {
      drawing.text(x + width / 2, y + kBar / 2 + 4, "middle", label, 10);
    }
  }
  draw_axis(drawing, simulation.makespan * percent, plot / 100.0, bottom);
  return drawing.finish(kLeft + plot + kRight, bottom + kAxis);
}

}  // namespace tessera
