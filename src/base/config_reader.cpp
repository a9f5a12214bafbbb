#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <utility>

#include "base/config_check.hpp"
#include "base/config_overrides.hpp"
#include "base/config_schema.hpp"
#include "base/config_values.hpp"
#include "tessera/base/config_file.hpp"

namespace tessera {

namespace {

/// Names that other programs give to our keys.
struct ForeignName {
  std::string_view theirs;
  std::string_view ours;
};

constexpr ForeignName kForeignNames[] = {
#include "base/megatron_names.inc"
    {"n_layer", "model.num_layers"},
    {"num_hidden_layers", "model.num_layers"},
    {"n_embd", "model.hidden_size"},
    {"d_model", "model.hidden_size"},
    {"n_head", "model.num_heads"},
    {"num_key_value_heads", "model.num_kv_heads"},
    {"n_inner", "model.ffn_hidden_size"},
    {"intermediate_size", "model.ffn_hidden_size"},
    {"n_positions", "model.max_positions"},
    {"rms_norm_eps", "model.norm_eps"},
    {"hidden_act", "model.activation"},
    {"tie_word_embeddings", "model.tied_head"},
    {"initializer_range", "model.init_std"},
    {"tp", "parallel.tensor"},
    {"pp", "parallel.pipeline"},
    {"virtual_pipeline_model_parallel_size", "parallel.virtual_stages"},
    {"num_virtual_stages_per_pipeline_rank", "parallel.virtual_stages"},
    {"pipeline_model_parallel_layout", "parallel.pipeline_layout"},
    {"expert_model_parallel_size", "parallel.expert"},
    {"data_parallel_size", "parallel.data"},
    {"context_parallel_size", "parallel.context"},
    {"dp", "parallel.data"},
    {"learning_rate", "optimizer.lr"},
    {"adam_eps", "optimizer.eps"},
    {"max_grad_norm", "optimizer.clip_grad"},
    {"max_steps", "training.steps"},
    {"sequence_length", "training.seq_length"},
    {"batch_size", "training.global_batch_size"},
    {"mixed_precision", "training.precision"},
    {"save_interval", "checkpoint.every"},
    {"report_to", "logging.trackers"},
    {"log_interval", "logging.every"},
};

/// Visitor: the full names of all keys.
class KeyLister {
 public:
  KeyLister(std::vector<std::string>& keys, std::string prefix) : keys_(keys), prefix_(std::move(prefix)) {}

  template <typename T>
  void field(const char* name, const T&, const char*, const Limits& = {}) {
    keys_.push_back(prefix_ + name);
  }
  template <typename Section>
  void group(const char* name, const Section& section, const char*) {
    KeyLister inner(keys_, prefix_ + name + ".");
    describe(inner, section);
  }

 private:
  std::vector<std::string>& keys_;
  std::string prefix_;
};

/// What the reader learns besides the values.
struct ReadState {
  Issues issues;
  std::map<std::string, Place> places;  ///< of every section and key that is given
  KeySet unreadable;

  /// Every key there is, in the order of the schema; listed when a fault first asks for them.
  const std::vector<std::string>& all_keys() {
    if (keys_.empty()) {
      const Settings defaults;
      KeyLister lister(keys_, "");
      describe(lister, defaults);
      sorted_ = keys_;
      std::sort(sorted_.begin(), sorted_.end());
    }
    return keys_;
  }
  /// The value of this key, or of all keys of this section, is not what was meant.
  void distrust(const std::string& key) {
    all_keys();
    for (auto at = std::lower_bound(sorted_.begin(), sorted_.end(), key);
         at != sorted_.end() && at->starts_with(key); ++at) {
      if (at->size() == key.size() || (*at)[key.size()] == '.') unreadable.insert(*at);
    }
  }

 private:
  std::vector<std::string> keys_, sorted_;
};

/// Where a key belongs that was written in the wrong place or under another program's name; empty if unknown.
std::string home_of(std::string_view name, ReadState& state) {
  for (const ForeignName& foreign : kForeignNames) {
    if (foreign.theirs == name) return std::string(foreign.ours);
  }
  for (const std::string& key : state.all_keys()) {
    if (std::string_view(key).substr(key.rfind('.') + 1) == name) return key;
  }
  return {};
}

/// Visitor: takes from one mapping the keys that the schema names, then complains about the others.
class SectionReader {
 public:
  SectionReader(const YamlNode& mapping, std::string path, ReadState& state)
      : mapping_(mapping), path_(std::move(path)), state_(state) {}

  template <typename T>
  void field(const char* name, T& value, const char*, const Limits& = {}) {
    known_.push_back(name);
    const YamlNode* node = mapping_.find(name);
    if (node == nullptr) return;
    const std::string key = key_of(name);
    state_.places[key] = node->place;
    if (node->kind == YamlNode::Kind::invalid) {
      state_.distrust(key);
      return;
    }
    const T default_value = value;
    const Refusal refusal = read_value(*node, value);
    if (refusal.empty()) return;
    value = default_value;
    state_.distrust(key);
    state_.issues.add(node->place, key, " ", refusal);
  }

  template <typename Section>
  void group(const char* name, Section& section, const char*) {
    known_.push_back(name);
    const YamlNode* node = mapping_.find(name);
    if (node == nullptr) return;
    const std::string key = key_of(name);
    state_.places[key] = node->place;
    // A section whose keys are all commented out.
    if (node->kind == YamlNode::Kind::null || node->kind == YamlNode::Kind::invalid) return;
    if (node->kind != YamlNode::Kind::mapping) {
      state_.issues.add(node->place, key, " must be a mapping of keys to values, not ", node->describe());
      state_.distrust(key);
      return;
    }
    SectionReader inner(*node, key, state_);
    describe(inner, section);
    inner.refuse_unknown();
  }

  void refuse_unknown() {
    for (const auto& [key, value] : mapping_.entries) {
      if (state_.issues.full()) return;
      if (std::find(known_.begin(), known_.end(), key.text) != known_.end()) continue;
      state_.issues.add(key.place, path_.empty() ? "unknown section " : "unknown key ", in_quotes(key.text),
                        path_.empty() ? "" : " in '" + path_ + "'", remedy(key.text));
    }
  }

 private:
  std::string key_of(const std::string& name) const { return path_.empty() ? name : path_ + "." + name; }

  /// What to write instead of an unknown name.
  std::string remedy(const std::string& name) {
    const Suggestion nearest = nearest_name(name, known_);
    const std::string home = nearest.distance > 1 ? home_of(name, state_) : "";
    if (!home.empty()) {
      state_.distrust(home);
      const bool is_here = !path_.empty() && home.starts_with(path_ + ".");
      return "; did you mean " + (is_here ? in_quotes(home.substr(path_.size() + 1)) : home) + "?";
    }
    for (const std::string_view absent : known_) {
      const bool may_be_meant = !nearest.close || absent == nearest.name;
      if (may_be_meant && mapping_.find(absent) == nullptr) state_.distrust(key_of(std::string(absent)));
    }
    return suggest(name, known_);
  }

  const YamlNode& mapping_;
  std::string path_;
  ReadState& state_;
  std::vector<std::string_view> known_;
};

/// The key's place, else that of the section it would stand in.
const Place* find_place(std::string key, const ReadState& state) {
  while (true) {
    const auto found = state.places.find(key);
    if (found != state.places.end()) return &found->second;
    const std::size_t dot = key.rfind('.');
    if (dot == std::string::npos) return nullptr;
    key.erase(dot);
  }
}

/// The first of the keys that is really written down is to blame; failing that a section, failing that the
/// file.
Place place_of(const Finding& finding, const ReadState& state, const Place& file) {
  for (const std::string& key : finding.keys) {
    const auto found = state.places.find(key);
    if (found != state.places.end()) return found->second;
  }
  for (const std::string& key : finding.keys) {
    if (const Place* place = find_place(key, state)) return *place;
  }
  return file;
}

[[noreturn]] void cannot_read(const std::filesystem::path& path, const std::string& why) {
  throw ConfigError(path.string() + ": " + why);
}

std::string read_file(const std::filesystem::path& path) {
  // Non-blocking, so that a pipe is refused instead of waited for.
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) cannot_read(path, std::string("the configuration cannot be opened: ") + std::strerror(errno));
  struct Closer {
    int file;
    ~Closer() { ::close(file); }
  } closer{file};
  struct stat status {};
  if (::fstat(file, &status) != 0) cannot_read(path, std::strerror(errno));
  if (S_ISDIR(status.st_mode)) cannot_read(path, "is a directory, not a configuration file");
  if (!S_ISREG(status.st_mode)) cannot_read(path, "is not a regular file");
  std::string text;
  std::array<char, 65536> buffer;
  // One byte more than is allowed tells an oversized file apart.
  while (text.size() <= (1u << 20)) {
    const ssize_t count = ::read(file, buffer.data(), buffer.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) cannot_read(path, std::string("reading failed: ") + std::strerror(errno));
    if (count == 0) break;
    text.append(buffer.data(), static_cast<std::size_t>(count));
  }
  return text;
}

}  // namespace

Config parse_config(std::string_view text, const std::string& name,
                    const std::vector<std::string>& overrides) {
  ReadState state;
  const Place file{name, 0, 1, 1};
  YamlNode root = parse_yaml(text, file, state.issues);
  // Without a sound tree any further message would be guesswork.
  if (root.kind != YamlNode::Kind::mapping) {
    if (state.issues.empty() && root.kind == YamlNode::Kind::null)
      state.issues.add(file, "the configuration is empty");
    if (state.issues.empty()) {
      state.issues.add(root.place, "the configuration must be a mapping of sections, not ", root.describe());
    }
    state.issues.throw_if_any();
  }
  for (std::size_t i = 0; i < overrides.size(); ++i) {
    apply_override(root, overrides[i], static_cast<int>(i) + 1, state.issues);
  }
  Settings settings;
  SectionReader reader(root, "", state);
  describe(reader, settings);
  reader.refuse_unknown();
  for (const Finding& finding : check(settings, state.unreadable)) {
    state.issues.add(place_of(finding, state, file), finding.message);
  }
  state.issues.throw_if_any();
  return settings;
}

Config load_config(const std::filesystem::path& path, const std::vector<std::string>& overrides) {
  return parse_config(read_file(path), path.string(), overrides);
}

}  // namespace tessera
