/// Files of Accelerate: those that every release writes, and those that guides print.

#include <algorithm>
#include <array>
#include <fstream>
#include <sstream>

#include "base/yaml_tree.hpp"
#include "launch/environment.hpp"
#include "launch_test_support.hpp"
#include "tessera/launch/settings.hpp"

namespace tessera {
namespace {

using launching::value_of;

struct Written {
  std::string first, last, kind, text;  ///< releases, distributed_type, the file
};

std::vector<Written> files_of_all_releases() {
  std::ifstream file("tests/launch/accelerate_files.txt");
  std::vector<Written> all;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with('#')) continue;
    std::istringstream words(line);
    Written written;
    words >> written.first >> written.last >> written.kind >> std::ws;
    std::getline(words, written.text);
    all.push_back(written);
  }
  return all;
}

LaunchSettings read(const std::string& text) { return parse_launch_file(text, "a.yaml"); }

bool warns(const LaunchSettings& settings, const std::string& part) {
  return std::any_of(settings.warnings.begin(), settings.warnings.end(),
                     [&](const std::string& text) { return text.find(part) != std::string::npos; });
}

/// "key" or "section.key" with the value's text, of all keys of the file.
std::vector<std::pair<std::string, std::string>> leaves(const std::string& text) {
  Issues issues;
  const YamlNode root = parse_yaml(text, Place{"a.yaml"}, issues);
  std::vector<std::pair<std::string, std::string>> all;
  for (const auto& [key, value] : root.entries) {
    if (value.kind == YamlNode::Kind::scalar) all.emplace_back(key.text, value.text);
    for (const auto& [name, inner] : value.entries) all.emplace_back(key.text + "." + name.text, inner.text);
  }
  return all;
}

/// What a value of a key must lead to: a variable of the script, or a member of the settings.
std::string effect_of(const LaunchSettings& settings, const std::string& key) {
  const auto number = [](const std::optional<std::int64_t>& value) {
    return value ? std::to_string(*value) : "";
  };
  const auto variable = [&](const char* name) { return value_of(settings.environment, name).value_or(""); };
  const auto yes = [](bool value) { return std::string(value ? "true" : "false"); };
  if (key.starts_with("megatron_lm_config.")) {
    std::string name = key.substr(key.find('.') + 1);
    for (char& c : name) c = static_cast<char>(std::toupper(c));
    return variable(name.c_str());
  }
  if (key == "distributed_type") return settings.distributed_type.value_or("");
  if (key == "num_processes") return number(settings.num_processes);
  if (key == "num_machines") return number(settings.num_machines);
  if (key == "machine_rank") return number(settings.machine_rank);
  if (key == "main_process_ip") return settings.main_process_ip.value_or("");
  if (key == "main_process_port") return number(settings.main_process_port);
  if (key == "mixed_precision") return variable("ACCELERATE_MIXED_PRECISION");
  if (key == "use_cpu") return yes(settings.cpu.value_or(false));
  if (key == "debug") return yes(variable("ACCELERATE_DEBUG_MODE") == "true");
  if (key == "enable_cpu_affinity") return yes(settings.pin_cores.value_or(false));
  if (key == "gpu_ids") {
    return variable("CUDA_VISIBLE_DEVICES").empty() ? "all" : variable("CUDA_VISIBLE_DEVICES");
  }
  return "none";
}

/// Keys whose only values in these kinds of file say what is so anyway, and the two of the rendezvous, which
/// the test below is about.
constexpr std::array<std::string_view, 8> kSayNothing{
    "compute_environment", "downcast_bf16", "main_training_function", "tpu_use_cluster",
    "tpu_use_sudo",        "rdzv_backend",  "same_network",           "tpu_env"};

TEST(AccelerateFiles, EveryKeyOfEveryReleaseHasItsEffectOrAWarning) {
  const auto files = files_of_all_releases();
  ASSERT_GT(files.size(), 40U);
  EXPECT_EQ(files.front().first, "0.15.0");
  EXPECT_EQ(files.back().last, "1.15.0");
  std::size_t warned = 0;
  for (const Written& file : files) {
    SCOPED_TRACE(file.first + " " + file.kind);
    LaunchSettings settings;
    EXPECT_EQ(refusal([&] { settings = read(file.text); }), "nothing was thrown");
    EXPECT_EQ(settings.distributed_type, file.kind);
    for (const auto& [key, value] : leaves(file.text)) {
      const std::string name = key.substr(key.find('.') + 1);
      const bool off = value == "false" || value == "NO";
      if (std::find(kSayNothing.begin(), kSayNothing.end(), key) != kSayNothing.end()) continue;
      if (effect_of(settings, key) == "none") {
        EXPECT_EQ(warns(settings, name + " " + value), !off) << key;
        warned += off ? 0 : 1;
      } else {
        EXPECT_EQ(effect_of(settings, key), value) << key;
      }
    }
    // And what nobody wrote is refused.
    std::string more = file.text;
    more.insert(more.size() - 1, R"(, "num_procesess": 2)");
    EXPECT_HAS(refusal([&] { read(more); }), "unknown key 'num_procesess'; did you mean 'num_processes'?");
  }
  EXPECT_GT(warned, 30U);
}

TEST(AccelerateFiles, AnotherRendezvousIsWarnedOfOnce) {
  const auto warnings = [](const std::string& keys) {
    return read("distributed_type: NO\n" + keys).warnings;
  };
  EXPECT_TRUE(warnings("rdzv_backend: static\nsame_network: true\n").empty());
  const auto both = warnings("rdzv_backend: c10d\nsame_network: false\n");
  ASSERT_EQ(both.size(), 1U);
  EXPECT_HAS(both[0],
             "rdzv_backend c10d and same_network false have no effect: the launchers always meet at");
  EXPECT_HAS(warnings("same_network: false\n").at(0), "same_network false has no effect");
}

TEST(AccelerateFiles, WarnOncePerSection) {
  const LaunchSettings settings = read(
      "distributed_type: MULTI_CPU\nipex_config:\n  ipex: true\n  use_xpu: true\nmpirun_config:\n"
      "  mpirun_ccl: '1'\n  mpirun_hostfile: /h\ndynamo_config: {}\nnum_processes: -1\n"
      "main_training_function: train\n");
  EXPECT_EQ(settings.warnings.size(), 3U);
  EXPECT_TRUE(warns(settings, "ipex_config (ipex true, use_xpu true) has no effect: "));
  EXPECT_TRUE(warns(settings, "mpirun_config (mpirun_hostfile /h, mpirun_ccl 1) has no effect: "));
  EXPECT_TRUE(warns(settings, "main_training_function 'train' has no effect"));
  EXPECT_EQ(settings.cpu, true);
  EXPECT_EQ(settings.num_processes, std::nullopt);
  EXPECT_TRUE(read("distributed_type: MULTI_CPU\nipex_config: {ipex: false}\n").warnings.empty());
  EXPECT_TRUE(warns(read("distributed_type: NO\ndynamo_backend: EAGER\n"), "dynamo_backend EAGER has no"));
  EXPECT_HAS(refusal([] { read("distributed_type: NO\nipex_config: {ipx: true}\n"); }),
             "unknown key 'ipex_config.ipx'; did you mean 'ipex'?");
  EXPECT_HAS(refusal([] { read("distributed_type: NO\ntp_config: {tp_size: 2}\n"); }),
             "tp_config is for PyTorch's parallelism");
}

constexpr const char* kPrinted =
    "compute_environment: LOCAL_MACHINE\ndistributed_type: MEGATRON_LM\ndowncast_bf16: 'no'\n"
    "machine_rank: 0\nmain_training_function: main\nmegatron_lm_config:\n"
    "@megatron_lm_gradient_clipping: 1.0\n@megatron_lm_learning_rate_decay_iters: 320000\n"
    "@megatron_lm_num_micro_batches: 1\n@megatron_lm_pp_degree: 2\n"
    "@megatron_lm_recompute_activations: true\n@megatron_lm_sequence_parallelism: false\n"
    "@megatron_lm_tp_degree: 2\nmixed_precision: bf16\nnum_machines: 1\nnum_processes: 8\n"
    "rdzv_backend: static\nsame_network: true\ntpu_env: []\ntpu_use_cluster: false\n"
    "tpu_use_sudo: false\nuse_cpu: false\n";

std::string printed(const std::string& indentation) {
  std::string text = kPrinted;
  for (auto at = text.find('@'); at != std::string::npos; at = text.find('@')) {
    text.replace(at, 1, indentation);
  }
  return text;
}

TEST(PrintedFiles, AreReadWithAndWithoutIndentation) {
  const LaunchSettings whole = read(printed("  "));
  EXPECT_TRUE(whole.warnings.empty());
  EXPECT_EQ(value_of(whole.environment, "MEGATRON_LM_LR_DECAY_ITERS"), "320000");
  EXPECT_EQ(value_of(whole.environment, "MEGATRON_LM_SEQUENCE_PARALLELISM"), "false");
  LaunchSettings flat = read(printed(""));
  ASSERT_EQ(flat.warnings.size(), 1U);
  EXPECT_HAS(flat.warnings[0], "a.yaml:7:32: megatron_lm_gradient_clipping, megatron_lm_learning_rate_");
  EXPECT_HAS(flat.warnings[0], "beside an empty megatron_lm_config");
  flat.warnings.clear();
  EXPECT_EQ(flat, whole);
}

TEST(PrintedFiles, OnlyAnEmptySectionTakesWhatStandsBesideIt) {
  EXPECT_HAS(refusal([] { read("distributed_type: MEGATRON_LM\nmegatron_lm_tp_degree: 2\n"); }),
             "a.yaml:2:24: megatron_lm_tp_degree stands at the top level; it belongs into the section");
  EXPECT_HAS(refusal([] {
               read(
                   "distributed_type: MEGATRON_LM\nmegatron_lm_pp_degree: 2\nmegatron_lm_config:\n"
                   "  megatron_lm_tp_degree: 2\n");
             }),
             "megatron_lm_pp_degree stands at the top level");
  EXPECT_HAS(
      refusal([] { read("distributed_type: MULTI_GPU\nmegatron_lm_config:\nmegatron_lm_tp_degree: 2\n"); }),
      "megatron_lm_config is for distributed_type MEGATRON_LM, not MULTI_GPU");
  EXPECT_HAS(
      refusal([] { read("distributed_type: MEGATRON_LM\nmegatron_lm_config:\nmegatron_lm_tp_degre: 2\n"); }),
      "unknown key 'megatron_lm_tp_degre'; did you mean 'megatron_lm_tp_degree'?");
  EXPECT_HAS(refusal([] {
               read("distributed_type: MEGATRON_LM\nmegatron_lm_config:\nmegatron_lm_tp_degree: two\n");
             }),
             "megatron_lm_tp_degree must be an integer of at least 1, not 'two'");
}

TEST(PrintedFiles, TwoNamesOfOneThingAgree) {
  const std::string start =
      "distributed_type: MEGATRON_LM\nmegatron_lm_config:\n  megatron_lm_lr_decay_iters: 5\n";
  EXPECT_EQ(value_of(read(start + "  megatron_lm_learning_rate_decay_iters: 5\n").environment,
                     "MEGATRON_LM_LR_DECAY_ITERS"),
            "5");
  EXPECT_HAS(
      refusal([&] { read(start + "  megatron_lm_learning_rate_decay_iters: 6\n"); }),
      "megatron_lm_learning_rate_decay_iters is another name of megatron_lm_lr_decay_iters, which says");
}

}  // namespace
}  // namespace tessera
