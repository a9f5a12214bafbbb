#include <algorithm>

#include "checkpoint/hf_read.hpp"

namespace tessera::checkpoint_detail {
namespace {

using Use = HfWindow::Use;

std::vector<bool> layers_of(const ModelConfig& model) {
  std::vector<bool> slides;
  for (std::int64_t i = 0; i < model.num_layers; ++i) slides.push_back(window_of(model, i) > 0);
  return slides;
}

/// What layers are where `layer_types` does not say it.
std::vector<bool> usual_layers(const Reader& in) {
  const HfWindow& window = in.spec.window;
  const auto count = static_cast<std::size_t>(in.model.num_layers);
  std::vector<bool> slides(count, true);
  if (window.use == Use::by_switch) {
    const double first = in.number("max_window_layers", 28);
    for (std::size_t i = 0; i < count; ++i) slides[i] = static_cast<double>(i) >= first;
  }
  if (window.use == Use::by_layer) {
    const std::int64_t every = window.every_key ? in.size(window.every_key, window.every) : window.every;
    for (std::size_t i = 0; i < count; ++i) slides[i] = (static_cast<std::int64_t>(i) + 1) % every != 0;
  }
  return slides;
}

/// A letter for each layer, cut to what repeats.
std::string shortest_pattern(const std::vector<bool>& layers, char yes, char no) {
  std::size_t period = 1;
  const auto repeats = [&] {
    for (std::size_t i = period; i < layers.size(); ++i) {
      if (layers[i] != layers[i - period]) return false;
    }
    return true;
  };
  while (!repeats()) ++period;
  std::string pattern;
  for (std::size_t i = 0; i < period; ++i) pattern += layers[i] ? yes : no;
  return pattern;
}

}  // namespace

template <typename Model>
void set_windows(Model& model, std::int64_t window, const std::vector<bool>& slides) {
  model.sliding_window.reset();
  model.window_pattern.reset();
  if (window == 0 || std::ranges::find(slides, true) == slides.end()) return;
  model.sliding_window = window;
  const std::string pattern = shortest_pattern(slides, 'S', 'F');
  // Null is the family's.
  if (pattern != "S" || spec_of(model.family).model.window_pattern) model.window_pattern = pattern;
}
template void set_windows(ModelSettings&, std::int64_t, const std::vector<bool>&);
template void set_windows(ModelConfig&, std::int64_t, const std::vector<bool>&);

template <typename Model>
void set_expert_layers(Model& model, const std::vector<bool>& mixed) {
  model.moe_layers.reset();
  const std::string pattern = shortest_pattern(mixed, 'E', 'D');
  if (pattern != "E") model.moe_layers = pattern;
}
template void set_expert_layers(ModelSettings&, const std::vector<bool>&);
template void set_expert_layers(ModelConfig&, const std::vector<bool>&);

void read_window(const Reader& in) {
  const HfWindow& spec = in.spec.window;
  const bool on = spec.use == Use::always || spec.use == Use::by_layer ||
                  (spec.use == Use::by_switch && in.flag("use_sliding_window", false));
  // Of a missing key Transformers takes its default, of null that there is no window.
  const bool has_window =
      on && (in.is_absent("sliding_window") ? spec.absent > 0 : in.root.find("sliding_window").has_value());
  const std::int64_t window = has_window ? in.size("sliding_window", spec.absent) : 0;
  std::vector<bool> slides = usual_layers(in);
  const auto layers = in.root.find("layer_types");
  const bool by_type = spec.use == Use::by_switch || spec.use == Use::by_layer;
  for (std::size_t i = 0; layers && i < layers->size(); ++i) {
    const std::string& type = (*layers)[i].text();
    const bool sliding = type == "sliding_attention" && by_type && has_window;
    if (type != "full_attention" && !sliding)
      (*layers)[i].fail("\"" + type + "\" is not supported here; full_attention is", Reader::kWay);
    if (by_type && i < slides.size()) slides[i] = sliding;
  }
  if (by_type && layers && layers->size() != slides.size())
    layers->fail(detail::concat("says ", layers->size(), " layers, and there are ", slides.size()),
                 Reader::kWay);
  set_windows(in.model, window, slides);
}

void write_window(const ModelConfig& model, const HfWindow& spec, Json& out) {
  if (spec.use == Use::never) return;
  if (!model.sliding_window) {
    if (spec.use != Use::by_switch) out["sliding_window"] = nullptr;
  } else {
    out["sliding_window"] = *model.sliding_window;
  }
  if (spec.use == Use::always) return;
  const std::vector<bool> slides = layers_of(model);
  if (spec.use == Use::by_switch) {
    if (!model.sliding_window) return;
    out["use_sliding_window"] = true;
    if (!out.contains("layer_types") && std::ranges::is_sorted(slides)) {  // full ones first
      out["max_window_layers"] = std::ranges::count(slides, false);
      return;
    }
  }
  out["layer_types"] = Json::array();
  for (const bool sliding : slides)
    out["layer_types"].push_back(sliding ? "sliding_attention" : "full_attention");
}

}  // namespace tessera::checkpoint_detail
