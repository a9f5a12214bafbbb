/// The flags and keys of `accelerate launch`: followed, warned about or refused.

#include "launch/accelerate_flags.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "launch/environment.hpp"
#include "launch_test_support.hpp"

namespace tessera::launching {
namespace {

LaunchProgram some_program() { return {{"sh", "-c", "true"}, false, {"PATH=/usr/bin:/bin"}, ""}; }

AccelerateFlags with_layout(std::string_view name, const std::string& value) {
  AccelerateFlags flags;
  flags.use_megatron_lm = true;
  for (std::size_t i = 0; i < megatron_keys().size(); ++i) {
    if (megatron_keys()[i].name == name) flags.megatron[i] = value;
  }
  return flags;
}

TEST(AccelerateFlags, BecomeTheWorkersEnvironment) {
  AccelerateFlags flags = with_layout("megatron_lm_tp_degree", "2");
  flags.mixed_precision = "BF16";
  flags.gpu_ids = "1,3";
  flags.debug = flags.same_network = flags.enable_cpu_affinity = true;
  flags.gradient_accumulation_steps = "4";
  const LaunchSettings settings = settings_of(flags);
  EXPECT_EQ(
      settings.environment,
      (Variables{"ACCELERATE_MIXED_PRECISION=bf16", "ACCELERATE_DEBUG_MODE=true", "CUDA_VISIBLE_DEVICES=1,3",
                 "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4", "MEGATRON_LM_TP_DEGREE=2"}));
  EXPECT_EQ(settings.distributed_type, "MEGATRON_LM");
  EXPECT_EQ(settings.pin_cores, true);
  EXPECT_TRUE(settings.warnings.empty());
  EXPECT_EQ(settings_of({}), LaunchSettings{});

  LaunchSettings four = settings;
  four.num_processes = 4;
  const LaunchOptions options = resolve_launch(four, some_program());
  EXPECT_EQ(value_of(options.environment, "ACCELERATE_USE_MEGATRON_LM"), "true");
  EXPECT_EQ(value_of(options.environment, "ACCELERATE_CPU_AFFINITY"), "1");
  EXPECT_TRUE(options.pin_cores);
}

TEST(AccelerateFlags, EveryMegatronKeyHasItsVariable) {
  for (const ScriptKey& key : megatron_keys()) {
    const bool size = key.name.find("expert_tensor") != std::string_view::npos;
    const std::string good = size || key.kind == ScriptKey::Kind::integer ? "1"
                             : key.kind == ScriptKey::Kind::boolean       ? "False"
                                                                          : "0.5";
    const LaunchSettings settings = settings_of(with_layout(key.name, good));
    ASSERT_EQ(settings.environment.size(), 1U) << key.name;
    std::string variable(key.same_as.empty() ? key.name : key.same_as);
    for (char& c : variable) c = static_cast<char>(std::toupper(c));
    EXPECT_EQ(settings.environment[0], variable + "=" + good);
    if (key.kind != ScriptKey::Kind::text) {
      EXPECT_HAS(refusal([&] { settings_of(with_layout(key.name, "x")); }),
                 "--" + std::string(key.name) + " must be");
    }
    if (size) {
      EXPECT_HAS(refusal([&] { settings_of(with_layout(key.name, "2")); }),
                 "than megatron_lm_tp_degree says");
    }
  }
}

TEST(AccelerateFlags, TwoNamesOfOneThingAgree) {
  AccelerateFlags flags = with_layout("megatron_lm_lr_decay_iters", "5");
  const std::size_t other = static_cast<std::size_t>(
      std::find_if(megatron_keys().begin(), megatron_keys().end(),
                   [](const ScriptKey& key) { return key.name == "megatron_lm_learning_rate_decay_iters"; }) -
      megatron_keys().begin());
  flags.megatron[other] = "5";
  EXPECT_EQ(settings_of(flags).environment, Variables{"MEGATRON_LM_LR_DECAY_ITERS=5"});
  flags.megatron[other] = "6";
  EXPECT_HAS(refusal([&] { settings_of(flags); }),
             "--megatron_lm_learning_rate_decay_iters is another name of --megatron_lm_lr_decay_iters");
}

TEST(AccelerateFlags, WithoutEffectWarn) {
  AccelerateFlags flags;
  flags.tee = "3";
  flags.role = "trainer";
  flags.monitor_interval = "1";
  flags.dynamo_backend = "inductor";
  flags.rdzv_conf = "timeout=7.5,last_call=2";
  flags.rdzv_backend = "c10d";
  const LaunchSettings settings = settings_of(flags);
  std::string all;
  for (const std::string& warning : settings.warnings) all += warning + "\n";
  EXPECT_EQ(settings.warnings.size(), 6U) << all;
  for (const char* part :
       {"--tee has no effect", "--role has no effect", "--monitor_interval has no effect",
        "backend inductor is left out", "last_call has no effect", "rdzv_backend c10d has no effect"}) {
    EXPECT_HAS(all, part);
  }
  EXPECT_EQ(settings.join_timeout_s, 7.5);
  EXPECT_EQ(settings.environment, Variables{"ACCELERATE_DYNAMO_BACKEND=NO"});
  AccelerateFlags mode;
  mode.dynamo_backend = "no";
  mode.dynamo_use_dynamic = true;
  EXPECT_EQ(settings_of(mode).warnings.size(), 1U);
  AccelerateFlags usual;
  usual.tee = "0";
  usual.role = "default";
  usual.rdzv_conf = "";
  usual.dynamo_backend = "no";
  EXPECT_TRUE(settings_of(usual).warnings.empty());
}

TEST(AccelerateFlags, FaultsComeAllAtOnce) {
  AccelerateFlags flags = with_layout("megatron_lm_pp_degree", "0");
  flags.multi_gpu = true;
  flags.mixed_precision = "fp8";
  flags.rdzv_backend = "etcd";
  flags.rdzv_conf = "timeout=soon,x";
  flags.gradient_accumulation_steps = "0";
  const std::string text = refusal([&] { settings_of(flags); });
  for (const char* part :
       {"--multi_gpu, --use_megatron_lm and --use_deepspeed are",
        "--mixed_precision fp8 is not in this build yet", "--rdzv_backend 'etcd' is unknown",
        "'timeout=soon' must give a number", "'x' must be KEY=VALUE",
        "--gradient_accumulation_steps must be an integer of at least 1, not '0'",
        "--megatron_lm_pp_degree must be an integer of at least 1, not '0'"}) {
    EXPECT_HAS(text, part);
  }
}

TEST(AccelerateFlags, OfOtherEnginesAreRefusedWithASentence) {
  for (const auto& [flag, part] : std::vector<std::pair<std::string, std::string>>{
           {"--deepspeed-moe-layer-cls-names", "is for DeepSpeed itself"},
           {"--use-fsdp", "is for PyTorch's FSDP"},
           {"--fsdp_sharding_strategy", "is for PyTorch's FSDP"},
           {"--parallelism_config_tp_size", "is for PyTorch's parallelism"},
           {"--tpu", "is for TPUs"},
           {"--tpu_use_sudo", "is for TPUs"},
           {"--aws_access_key_id", "Amazon SageMaker"},
           {"--fp8_backend", "not in this build yet"},
           {"--mpirun_hostfile", "with mpirun itself"},
           {"--nproc_per_node", "--num_processes"},
           {"--num_gpus", "--num_processes"},
           {"--num-nodes", "--num_machines"},
           {"--master_addr", "--main_process_ip"},
           {"--no_ssh", "with --machine_rank"},
           {"--launcher", "over ssh"}}) {
    EXPECT_HAS(foreign_flag(flag), part);
  }
  for (const char* flag : {"--num_procs", "-x", "--", "--tpux", "--environment"}) {
    EXPECT_EQ(foreign_flag(flag), "") << flag;
  }
}

/// The flags with one of DeepSpeed's.
AccelerateFlags with_deepspeed(std::string_view name, const std::string& value) {
  AccelerateFlags flags;
  flags.use_deepspeed = true;
  for (std::size_t i = 0; i < deepspeed_keys().size(); ++i) {
    if (deepspeed_keys()[i].name == name) flags.deepspeed[i] = value;
  }
  return flags;
}

TEST(AccelerateFlags, OfDeepSpeedAreVariablesOfItsPlugin) {
  const LaunchProgram program{{"sh"}, false, {"PATH=/usr/bin:/bin"}, ""};
  const AccelerateFlags flags = with_deepspeed("offload_optimizer_device", "CPU");
  const auto environment = resolve_launch(settings_of(flags), program).environment;
  EXPECT_EQ(value_of(environment, "ACCELERATE_USE_DEEPSPEED"), "true");
  EXPECT_EQ(value_of(environment, "ACCELERATE_USE_MEGATRON_LM"), "false");
  EXPECT_EQ(value_of(environment, "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"), "cpu");
  EXPECT_HAS(refusal([] { settings_of(with_deepspeed("zero_stage", "4")); }),
             "--zero_stage must be one of 0,1,2,3, not '4'");
  for (const auto& [name, value] : {std::pair{"zero_stage", "3"}, {"gradient_clipping", "1.0"}}) {
    AccelerateFlags alone = with_deepspeed(name, value);
    alone.use_deepspeed = false;
    const std::string text = refusal([&] { resolve_launch(settings_of(alone), program); });
    EXPECT_HAS(text, std::string("--") + name + " needs --use_deepspeed");
    EXPECT_EQ(text.find("--megatron_lm_gradient_clipping") != std::string::npos,
              name == std::string("gradient_clipping"));
  }
  // Another way of training on the command line takes nothing of a file's.
  const LaunchSettings file =
      parse_launch_file("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\n", "a");
  AccelerateFlags plain;
  plain.multi_gpu = true;
  LaunchProgram inherits = program;
  inherits.environment.emplace_back("ACCELERATE_USE_DEEPSPEED=true");
  const auto over = resolve_launch(overlay(file, settings_of(plain)), inherits).environment;
  EXPECT_EQ(value_of(over, "ACCELERATE_DEEPSPEED_ZERO_STAGE"), std::nullopt);
  EXPECT_EQ(value_of(over, "ACCELERATE_USE_DEEPSPEED"), "false");
  EXPECT_EQ(value_of(resolve_launch(settings_of(plain), program).environment, "ACCELERATE_USE_DEEPSPEED"),
            std::nullopt);
}

TEST(AccelerateFlags, ComeBeforeTheFile) {
  const LaunchSettings file = parse_launch_file(
      "distributed_type: MEGATRON_LM\nnum_processes: 4\nmixed_precision: fp16\nmegatron_lm_config:\n"
      "  megatron_lm_tp_degree: 4\n  megatron_lm_pp_degree: 1\n",
      "a");
  const LaunchSettings both = overlay(file, settings_of(with_layout("megatron_lm_tp_degree", "2")));
  const LaunchOptions options = resolve_launch(both, some_program());
  EXPECT_EQ(value_of(options.environment, "MEGATRON_LM_TP_DEGREE"), "2");
  EXPECT_EQ(value_of(options.environment, "ACCELERATE_MIXED_PRECISION"), "fp16");

  // Another kind of training drops the file's layout.
  AccelerateFlags plain;
  plain.multi_gpu = true;
  const LaunchOptions without = resolve_launch(overlay(file, settings_of(plain)), some_program());
  EXPECT_EQ(value_of(without.environment, "ACCELERATE_USE_MEGATRON_LM"), "false");
  EXPECT_EQ(value_of(without.environment, "MEGATRON_LM_TP_DEGREE"), std::nullopt);
}

TEST(Layouts, AreRefusedBeforeAnythingStarts) {
  LaunchSettings settings = settings_of(with_layout("megatron_lm_tp_degree", "3"));
  settings.num_processes = 4;
  EXPECT_HAS(refusal([&] { resolve_launch(settings, some_program()); }),
             "num_processes 4 must be a multiple of 3, which is megatron_lm_tp_degree 3 x "
             "megatron_lm_pp_degree 1");
  AccelerateFlags alone = with_layout("megatron_lm_tp_degree", "2");
  alone.use_megatron_lm = false;
  EXPECT_HAS(refusal([&] { resolve_launch(settings_of(alone), some_program()); }),
             "--megatron_lm_tp_degree needs --use_megatron_lm");
  const std::string text = refusal([] {
    parse_launch_file(
        "distributed_type: MULTI_GPU\nmixed_precision: fp8\nmegatron_lm_config:\n"
        "  megatron_lm_tp_degree: x\n  megatron_lm_expert_tensor_parallel_size: 2\n",
        "a");
  });
  EXPECT_HAS(text, "megatron_lm_config is for distributed_type MEGATRON_LM, not MULTI_GPU");
  EXPECT_HAS(text, "mixed_precision fp8 is not in this build yet");
  EXPECT_HAS(text, "megatron_lm_config.megatron_lm_tp_degree must be an integer of at least 1, not 'x'");
  EXPECT_HAS(text, "asks for other tensor ranks of experts");
}

TEST(Gpus, AreExpectedByWhatNamesThem) {
  LaunchSettings settings;
  EXPECT_FALSE(expects_gpus(settings));
  for (const char* type : {"MULTI_GPU", "MEGATRON_LM"}) {
    settings.distributed_type = type;
    EXPECT_TRUE(expects_gpus(settings));
  }
  settings.cpu = true;
  EXPECT_FALSE(expects_gpus(settings));
}

TEST(NoPython, ExecutesTheScriptItself) {
  const auto script =
      std::filesystem::temp_directory_path() / ("tessera-script-" + std::to_string(::getpid()) + ".py");
  std::ofstream(script) << "#!/bin/sh\n";
  std::filesystem::permissions(script, std::filesystem::perms::owner_all);
  LaunchProgram program{{script.string()}, false, {"PATH=/usr/bin:/bin"}, ""};
  EXPECT_NE(resolve_launch({}, program).program, script.string());
  program.no_python = true;
  EXPECT_EQ(resolve_launch({}, program).program, script.string());
  program.module = true;
  EXPECT_HAS(refusal([&] { resolve_launch({}, program); }), "--module and --no_python contradict");
  std::filesystem::remove(script);
}

TEST(DefaultFile, OursComesFirst) {
  namespace fs = std::filesystem;
  const fs::path home = fs::temp_directory_path() / ("tessera-home-" + std::to_string(::getpid()));
  const auto make = [&](const std::string& name) {
    fs::create_directories((home / name).parent_path());
    std::ofstream(home / name) << "distributed_type: 'NO'\n";
    return (home / name).string();
  };
  const Variables at_home{"HOME=" + home.string()};
  EXPECT_EQ(default_launch_file(at_home), std::nullopt);
  EXPECT_EQ(default_launch_file({}), std::nullopt);
  const std::string json = make(".cache/huggingface/accelerate/default_config.json");
  EXPECT_EQ(default_launch_file(at_home), json);
  const std::string theirs = make(".cache/huggingface/accelerate/default_config.yaml");
  EXPECT_EQ(default_launch_file(at_home), theirs);
  const std::string ours = make(".config/tessera/default_config.yaml");
  EXPECT_EQ(default_launch_file(at_home), ours);
  const std::string hf = make("hf/accelerate/default_config.yaml");
  EXPECT_EQ(default_launch_file({at_home[0], "XDG_CONFIG_HOME=/nowhere", "HF_HOME=" + home.string() + "/hf"}),
            hf);
  const std::string cache = make("cache/huggingface/accelerate/default_config.yaml");
  EXPECT_EQ(default_launch_file(
                {at_home[0], "XDG_CONFIG_HOME=/nowhere", "XDG_CACHE_HOME=" + home.string() + "/cache"}),
            cache);
  const std::string xdg = make("xdg/tessera/default_config.yaml");
  EXPECT_EQ(default_launch_file({at_home[0], "XDG_CONFIG_HOME=" + home.string() + "/xdg"}), xdg);
  fs::remove_all(home);
}

}  // namespace
}  // namespace tessera::launching
