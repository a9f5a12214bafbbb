#include <cmath>

#include "base/config_schema.hpp"
#include "base/config_values.hpp"
#include "tessera/base/config_file.hpp"
#include "tessera/base/families.hpp"

namespace tessera {

namespace {

class YamlPrinter {
 public:
  YamlPrinter(std::string& text, int indent) : text_(text), indent_(indent) {}

  template <typename T>
  void field(const char* name, const T& value, const char*, const Limits& = {}) {
    text_ += std::string(indent_, ' ') + name + ": " + yaml_text(value) + "\n";
  }
  template <typename Section>
  void group(const char* name, const Section& section, const char*) {
    text_ += std::string(indent_, ' ') + name + ":\n";
    YamlPrinter inner(text_, indent_ + 2);
    describe(inner, section);
  }

 private:
  std::string& text_;
  int indent_;
};

void spell(std::string& item, const auto& value) { item = yaml_text(value); }

template <typename T>
void spell(ConfigValue& item, const T& value) {
  if constexpr (IsChoice<T>) {
    item = std::string(name_of(value));
  } else {
    item = value;
  }
}
void spell(ConfigValue& item, const WeightedPaths& value) {
  if (!value.empty()) item = value;  // none is null in the YAML too
}
template <typename T>
void spell(ConfigValue& item, const std::optional<T>& value) {
  if (value) spell(item, *value);
}

/// Lists pairs of a key and its value, as text or as such.
template <typename Item>
class ItemLister {
 public:
  ItemLister(std::vector<Item>& items, std::string prefix) : items_(items), prefix_(std::move(prefix)) {}

  template <typename T>
  void field(const char* name, const T& value, const char*, const Limits& = {}) {
    auto& [key, item] = items_.emplace_back();
    key = prefix_ + name;
    spell(item, value);
  }
  template <typename Section>
  void group(const char* name, const Section& section, const char*) {
    ItemLister inner(items_, prefix_ + name + ".");
    describe(inner, section);
  }

 private:
  std::vector<Item>& items_;
  std::string prefix_;
};

std::string limit_text(double value) {
  if (std::abs(value) >= 1e5 && std::fmod(value, 1e5) == 0.0) return detail::concat(value);
  return std::to_string(static_cast<std::int64_t>(value));
}

std::string range_text(const Limits& limits) {
  const bool low = std::isfinite(limits.min);
  const bool high = std::isfinite(limits.max);
  if (low && high && limits.min == limits.max) return ": " + limit_text(limits.min);
  if (low && high && !limits.above && !limits.below) {
    return ", " + limit_text(limits.min) + " to " + limit_text(limits.max);
  }
  std::string text;
  if (low) text += (limits.above ? " > " : " ≥ ") + limit_text(limits.min);
  if (high)
    text += detail::concat(text.empty() ? "" : ",", limits.below ? " < " : " ≤ ", limit_text(limits.max));
  return text;
}

std::string type_text(std::int64_t, const Limits& limits) { return "integer" + range_text(limits); }
std::string type_text(double, const Limits& limits) { return "number" + range_text(limits); }
std::string type_text(bool, const Limits&) { return "true or false"; }
std::string type_text(const std::string&, const Limits&) { return "text"; }
std::string type_text(const std::vector<double>&, const Limits&) { return "list of numbers"; }
std::string type_text(const std::vector<std::int64_t>&, const Limits&) { return "list of two integers"; }
std::string type_text(const std::vector<std::string>&, const Limits&) { return "list of texts"; }
std::string type_text(const WeightedPaths&, const Limits&) { return "text, list or null"; }

template <IsChoice E>
std::string type_text(E, const Limits&) {
  std::string text;
  for (const EnumName<E>& entry : names_of(E{}).values) {
    text += detail::concat(text.empty() ? "" : ", ", "`", entry.name, "`");
  }
  return text;
}

template <typename T>
std::string type_text(const std::optional<T>&, const Limits& limits) {
  return type_text(T{}, limits) + " or null";
}

template <typename T>
std::string later_text(const T&) {
  return {};
}

template <IsChoice E>
std::string later_text(const E&) {
  std::string text;
  for (const LaterName& name : names_of(E{}).later) {
    text += detail::concat(text.empty() ? " (later: " : ", ", name.name);
  }
  return text.empty() ? text : text + ")";
}

/// What each family supplies: a row a key.
std::string family_table() {
  const auto row = [](const std::string& key, const auto& value_of) {
    std::string line = detail::concat("| ", key, " |");
    for (const ModelSpec& each : families()) {
      if (each.is_family()) line += detail::concat(" ", value_of(each), " |");
    }
    return line + "\n";
  };
  std::string text =
      row("Left open", [](const ModelSpec& each) { return detail::concat("`", each.name, "`"); });
  text += row("---", [](const ModelSpec&) { return std::string("---"); });
  const auto add = [&](const char* key, auto field) {
    text += row(detail::concat("`", key, "`"), [&](const ModelSpec& each) {
      return yaml_text(ModelConfig(ModelSettings{.family = each.family}).*field);
    });
  };
  add("position_embedding", &ModelConfig::position_embedding);
  add("norm", &ModelConfig::norm);
  add("norm_placement", &ModelConfig::norm_placement);
  add("shared_norm", &ModelConfig::shared_norm);
  add("norm_zero_centered", &ModelConfig::norm_zero_centered);
  add("norm_bias", &ModelConfig::norm_bias);
  add("qk_norm", &ModelConfig::qk_norm);
  add("embedding_norm", &ModelConfig::embedding_norm);
  add("embedding_scaled", &ModelConfig::embedding_scaled);
  add("attention_softcap", &ModelConfig::attention_softcap);
  add("logit_softcap", &ModelConfig::logit_softcap);
  add("activation", &ModelConfig::activation);
  add("tied_head", &ModelConfig::tied_head);
  add("linear_bias", &ModelConfig::linear_bias);
  add("qkv_bias", &ModelConfig::qkv_bias);
  add("parallel_residual", &ModelConfig::parallel_residual);
  add("token_types", &ModelConfig::token_types);
  add("binary_head", &ModelConfig::binary_head);
  add("relative_buckets", &ModelConfig::relative_buckets);
  add("relative_max_distance", &ModelConfig::relative_max_distance);
  return text;
}

class MarkdownPrinter {
 public:
  MarkdownPrinter(std::string& text, std::string prefix, int depth)
      : text_(text), prefix_(std::move(prefix)), depth_(depth) {}

  template <typename T>
  void field(const char* name, const T& value, const char* meaning, const Limits& limits = {}) {
    text_ += detail::concat("| `", prefix_, name, "` | ", type_text(value, limits), " | `", yaml_text(value),
                            "` | ", meaning, later_text(value), " |\n");
  }
  template <typename Section>
  void group(const char* name, const Section& section, const char* meaning) {
    if (depth_ == 0) {
      text_ += detail::concat(text_.empty() ? "" : "\n", "### ", name, "\n\n", meaning,
                              "\n\n| Key | Type | Default | Meaning |\n|---|---|---|---|\n");
    } else {
      text_ += detail::concat("| `", prefix_, name, "` | mapping | | ", meaning, " |\n");
    }
    MarkdownPrinter inner(text_, depth_ == 0 ? "" : prefix_ + name + ".", depth_ + 1);
    describe(inner, section);
    if constexpr (std::is_same_v<Section, ModelSettings>) text_ += detail::concat("\n", family_table());
  }

 private:
  std::string& text_;
  std::string prefix_;
  int depth_;
};

}  // namespace

std::string to_yaml(const Settings& settings) {
  std::string text;
  YamlPrinter printer(text, 0);
  describe(printer, settings);
  return text;
}

std::vector<ConfigItem> list_items(const Settings& settings) {
  std::vector<ConfigItem> items;
  ItemLister lister(items, "");
  describe(lister, settings);
  return items;
}

std::string config_markdown() {
  std::string text;
  const Settings defaults;
  MarkdownPrinter printer(text, "", 0);
  describe(printer, defaults);
  return text;
}

std::vector<std::pair<std::string, ConfigValue>> list_values(const Settings& settings) {
  std::vector<std::pair<std::string, ConfigValue>> values;
  ItemLister lister(values, "");
  describe(lister, settings);
  return values;
}

}  // namespace tessera
