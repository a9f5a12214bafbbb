/// Flags and files, and what becomes of them.

#include "tessera/launch/settings.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "launch/environment.hpp"
#include "launch_test_support.hpp"

namespace tessera {
namespace {

using launching::value_of;

LaunchProgram some_program() { return {{"sh", "-c", "true"}, false, {"PATH=/usr/bin:/bin", "A=1"}, ""}; }

TEST(LaunchFile, Native) {
  const LaunchSettings settings = parse_launch_file(
      "launch:\n  num_processes: 8\n  num_machines: 2\n  machine_rank: 1\n  main_process_ip: 10.0.0.1\n"
      "  main_process_port: 4000\n  max_restarts: 3\n  threads_per_process: 4\n  log_dir: logs\n"
      "  secret_file: s\n  allow_secret_mode: true\n  grace_s: 2.5\n  join_timeout_s: 9\n  restart_delay_s: "
      "0.5\n  cpu: yes\n"
      "  quiet: false\n",
      "l.yaml");
  LaunchSettings expected;
  expected.num_processes = 8;
  expected.num_machines = 2;
  expected.machine_rank = 1;
  expected.main_process_ip = "10.0.0.1";
  expected.main_process_port = 4000;
  expected.max_restarts = 3;
  expected.threads_per_process = 4;
  expected.log_dir = "logs";
  expected.secret_file = "s";
  expected.allow_secret_mode = true;
  expected.grace_s = 2.5;
  expected.join_timeout_s = 9;
  expected.restart_delay_s = 0.5;
  expected.cpu = true;
  expected.quiet = false;
  EXPECT_EQ(settings, expected);
  EXPECT_EQ(parse_launch_file("launch: {num_processes: null}", "l.yaml"), LaunchSettings{});
  EXPECT_EQ(parse_launch_file("launch:\n", "l.yaml"), LaunchSettings{});
}

TEST(LaunchFile, FaultsOfANativeFileComeAllAtOnce) {
  const std::string text = refusal([] {
    parse_launch_file(
        "launch:\n  num_proceses: 8\n  machine_rank: one\n  grace_s: [1]\n  cpu: maybe\nlunch: {}\n",
        "l.yaml");
  });
  EXPECT_HAS(text, "l.yaml:2:3: unknown key 'launch.num_proceses'; did you mean 'num_processes'?");
  EXPECT_HAS(text, "l.yaml:3:17: launch.machine_rank must be an integer, not 'one'");
  EXPECT_HAS(text, "l.yaml:4:12: launch.grace_s must be a number, not a list");
  EXPECT_HAS(text, "l.yaml:5:8: launch.cpu must be true or false, not 'maybe'");
  EXPECT_HAS(text, "l.yaml:6:1: unknown section 'lunch'");
  EXPECT_HAS(refusal([] { parse_launch_file("", "l.yaml"); }), "l.yaml: is no launch file");
  EXPECT_HAS(refusal([] { parse_launch_file("- 1", "l.yaml"); }), "l.yaml: is no launch file");
  EXPECT_HAS(refusal([] { parse_launch_file("launch: {a: 1, a: 2}", "l.yaml"); }), "duplicate key 'a'");
  EXPECT_HAS(refusal([] { parse_launch_file("launch: 3", "l.yaml"); }), "launch must be a mapping");
  EXPECT_HAS(refusal([] { read_launch_file("/nowhere/l.yaml"); }), "/nowhere/l.yaml: cannot be read");
  EXPECT_HAS(refusal([] { read_launch_file("/tmp"); }), "/tmp: is a folder");
}

TEST(LaunchFile, OfAccelerate) {
  const LaunchSettings settings = parse_launch_file(
      "compute_environment: LOCAL_MACHINE\ndebug: true\ndistributed_type: MEGATRON_LM\ndowncast_bf16: 'no'\n"
      "gpu_ids: 0,1\nmachine_rank: 1\nmain_process_ip: 10.0.0.7\nmain_process_port: 5000\n"
      "main_training_function: main\nmegatron_lm_config:\n  megatron_lm_tp_degree: 4\n"
      "  megatron_lm_recompute_activations: false\ndynamo_config:\n  dynamo_backend: "
      "INDUCTOR\ndeepspeed_config: {}\n"
      "fsdp_config: {}\nmixed_precision: fp16\nnum_machines: 2\nnum_processes: 8\nrdzv_backend: c10d\n"
      "same_network: true\ntpu_env: []\ntpu_use_cluster: false\nuse_cpu: false\ntpu_name: null\n",
      "a.yaml");
  EXPECT_EQ(settings.num_processes, 8);
  EXPECT_EQ(settings.num_machines, 2);
  EXPECT_EQ(settings.machine_rank, 1);
  EXPECT_EQ(settings.main_process_ip, "10.0.0.7");
  EXPECT_EQ(settings.main_process_port, 5000);
  EXPECT_EQ(settings.cpu, false);
  EXPECT_EQ(settings.distributed_type, "MEGATRON_LM");
  const std::vector<std::string> expected{"ACCELERATE_MIXED_PRECISION=fp16",
                                          "ACCELERATE_DEBUG_MODE=true",
                                          "CUDA_VISIBLE_DEVICES=0,1",
                                          "MEGATRON_LM_TP_DEGREE=4",
                                          "MEGATRON_LM_RECOMPUTE_ACTIVATIONS=false",
                                          "ACCELERATE_DYNAMO_BACKEND=NO"};
  EXPECT_EQ(settings.environment, expected);
  ASSERT_EQ(settings.warnings.size(), 2U);
  EXPECT_HAS(settings.warnings[0] + settings.warnings[1],
             "dynamo_config (dynamo_backend INDUCTOR) has no effect: Tessera's kernels");
  EXPECT_HAS(settings.warnings[0] + settings.warnings[1],
             "rdzv_backend c10d has no effect: the launchers always meet at main_process_ip");
  EXPECT_EQ(parse_launch_file("distributed_type: 'NO'\nfp16: true\n", "a").environment,
            std::vector<std::string>{"ACCELERATE_MIXED_PRECISION=fp16"});
  EXPECT_EQ(parse_launch_file("{\"distributed_type\": \"MULTI_CPU\", \"num_processes\": 2}", "a.json")
                .num_processes,
            2);
}

/// As `accelerate config` writes it when asked for DeepSpeed.
constexpr const char* kDeepSpeedFile =
    "compute_environment: LOCAL_MACHINE\ndebug: false\ndeepspeed_config:\n  deepspeed_hostfile: hosts\n"
    "  deepspeed_inclusion_filter: a\n  deepspeed_multinode_launcher: pdsh\n  gradient_accumulation_steps: "
    "4\n"
    "  gradient_clipping: 1.0\n  offload_optimizer_device: CPU\n  offload_param_device: none\n"
    "  zero3_init_flag: false\n  zero_stage: 2\ndistributed_type: DEEPSPEED\ndowncast_bf16: 'no'\n"
    "machine_rank: 0\nmain_training_function: main\nmixed_precision: bf16\nnum_machines: 2\nnum_processes: "
    "8\n"
    "rdzv_backend: static\nsame_network: true\ntpu_env: []\ntpu_use_cluster: false\nuse_cpu: false\n";

TEST(LaunchFile, OfDeepSpeedGivesItsStagesAsVariables) {
  const LaunchSettings settings = parse_launch_file(kDeepSpeedFile, "a.yaml");
  const auto is = [&](const char* name) { return value_of(settings.environment, name).value_or("unset"); };
  EXPECT_EQ(is("ACCELERATE_DEEPSPEED_ZERO_STAGE"), "2");
  EXPECT_EQ(is("ACCELERATE_GRADIENT_CLIPPING"), "1.0");
  EXPECT_EQ(is("ACCELERATE_GRADIENT_ACCUMULATION_STEPS"), "4");
  EXPECT_EQ(is("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"), "cpu");
  EXPECT_EQ(is("ACCELERATE_DEEPSPEED_CONFIG_FILE"), "unset");
  EXPECT_EQ(settings.hostfile, "hosts");
  EXPECT_EQ(settings.include, "a");
  EXPECT_EQ(settings.num_processes, std::nullopt) << "the hostfile says how many";
  EXPECT_EQ(settings.machine_rank, std::nullopt);
  EXPECT_TRUE(settings.warnings.empty());
  EXPECT_TRUE(expects_gpus(settings));
  std::string by_hand = kDeepSpeedFile;
  by_hand.replace(by_hand.find("pdsh"), 4, "standard");
  EXPECT_EQ(parse_launch_file(by_hand, "a.yaml").hostfile, std::nullopt);
  EXPECT_EQ(parse_launch_file(by_hand, "a.yaml").machine_rank, 0);
  by_hand.replace(by_hand.find("standard"), 8, "openmpi");
  ASSERT_EQ(parse_launch_file(by_hand, "a.yaml").warnings.size(), 1U);
  EXPECT_HAS(parse_launch_file(by_hand, "a.yaml").warnings[0], "openmpi has no effect");
}

TEST(LaunchFile, FaultsOfDeepSpeedsSectionAreNamed) {
  const std::string text = refusal([] {
    parse_launch_file(
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 4\n  offload_param_device: nvme\n"
        "  gradient_accumulation_steps: 0\n  deepspeed_moe_layer_cls_names: Block\n  zero_stge: 2\n",
        "a.yaml");
  });
  EXPECT_HAS(text, "a.yaml:3:15: deepspeed_config.zero_stage must be one of 0,1,2,3, not '4'");
  EXPECT_HAS(text, "offload_param_device must be one of none,cpu, not 'nvme'");
  EXPECT_HAS(text, "gradient_accumulation_steps must be at least 1, not 0");
  EXPECT_HAS(text, "deepspeed_moe_layer_cls_names has no place here");
  EXPECT_HAS(text, "unknown key 'deepspeed_config.zero_stge'; did you mean 'zero_stage'?");
  EXPECT_HAS(refusal([] {
               parse_launch_file("distributed_type: MULTI_GPU\ndeepspeed_config: {zero_stage: 3}\n",
                                 "a.yaml");
             }),
             "deepspeed_config is for distributed_type DEEPSPEED, not MULTI_GPU");
}

TEST(ResolveLaunch, AHostfileThatNobodyHasReadIsRefused) {
  LaunchSettings settings;
  settings.hostfile = "hosts";
  settings.machine_rank = 0;
  EXPECT_HAS(refusal([&] { resolve_launch(settings, some_program()); }), "hostfile is for `tessera launch`");
}

TEST(LaunchFile, WhatTesseraCannotDoIsRefusedByName) {
  const std::string text = refusal([] {
    parse_launch_file(
        "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: FSDP\ndeepspeed_config:\n  "
        "zero_stage: 3\n"
        "mixed_precision: int8\nnum_process: 3\ntpu_name: x\nfsdp_config: {a: 1}\n"
        "megatron_lm_config:\n  megatron_lm_tp_degre: 2\n",
        "a.yaml");
  });
  EXPECT_HAS(text, "a.yaml:1:22: compute_environment 'AMAZON_SAGEMAKER' is not supported");
  EXPECT_HAS(text, "a.yaml:2:19: distributed_type 'FSDP' is not what Tessera does (known: NO, MULTI_CPU");
  EXPECT_HAS(text, "a.yaml:5:18: mixed_precision 'int8' is no precision");
  EXPECT_HAS(text, "a.yaml:6:1: unknown key 'num_process'; did you mean 'num_processes'?");
  EXPECT_HAS(text, "tpu_name is for TPUs");
  EXPECT_HAS(text, "fsdp_config is for PyTorch's FSDP");
  EXPECT_HAS(text,
             "unknown key 'megatron_lm_config.megatron_lm_tp_degre'; did you mean 'megatron_lm_tp_degree'?");
  EXPECT_HAS(refusal([] { parse_launch_file("num_processes: 2\n", "a.yaml"); }),
             "distributed_type is missing");
}

TEST(LaunchSettings, FlagsComeBeforeTheFile) {
  LaunchSettings file, flags;
  file.num_processes = 4;
  file.log_dir = "a";
  file.environment = {"X=1"};
  flags.num_processes = 2;
  flags.grace_s = 1;
  const LaunchSettings both = overlay(file, flags);
  EXPECT_EQ(both.num_processes, 2);
  EXPECT_EQ(both.log_dir, "a");
  EXPECT_EQ(both.grace_s, 1);
  EXPECT_EQ(both.environment, file.environment);
  EXPECT_FALSE(both.num_machines);
}

TEST(ResolveLaunch, Defaults) {
  const LaunchOptions options = resolve_launch({}, some_program());
  EXPECT_EQ(options.num_processes, 1);
  EXPECT_EQ(options.num_machines, 1);
  EXPECT_EQ(options.main_process_ip, "127.0.0.1");
  EXPECT_EQ(options.main_process_port, 0);
  EXPECT_EQ(options.secret, "");
  EXPECT_EQ(options.max_restarts, 0);
  EXPECT_FALSE(options.quiet);
  EXPECT_TRUE(options.program.ends_with("/sh")) << options.program;
  EXPECT_EQ(options.argv, (std::vector<std::string>{"sh", "-c", "true"}));
  EXPECT_EQ(options.environment, some_program().environment);
}

TEST(ResolveLaunch, SeveralMachines) {
  LaunchSettings settings;
  settings.num_machines = 2;
  settings.num_processes = 6;
  settings.machine_rank = 1;
  settings.main_process_ip = "10.1.1.1";
  LaunchProgram program = some_program();
  program.environment.push_back("TESSERA_JOB_SECRET=a secret long enough");
  const LaunchOptions options = resolve_launch(settings, program);
  EXPECT_EQ(options.main_process_port, 29500);
  EXPECT_EQ(options.secret, "a secret long enough");

  const auto file = std::filesystem::temp_directory_path() / ("tessera-secret-" + std::to_string(::getpid()));
  std::ofstream(file) << "  another secret of the job\n\n";
  settings.secret_file = file.string();
  for (const mode_t mode : {0640, 0604, 0660}) {
    ::chmod(file.c_str(), mode);
    const std::string text = refusal([&] { resolve_launch(settings, program); });
    EXPECT_HAS(
        text, detail::concat("can be read by others (mode ", std::oct, mode, "): chmod 600 ", file.string()));
    EXPECT_HAS(text, "--allow_secret_mode");
    settings.allow_secret_mode = true;
    EXPECT_EQ(resolve_launch(settings, program).secret, "another secret of the job");
    settings.allow_secret_mode.reset();
  }
  ::chmod(file.c_str(), 0400);
  EXPECT_EQ(resolve_launch(settings, program).secret, "another secret of the job");
  ::chmod(file.c_str(), 0600);
  EXPECT_EQ(resolve_launch(settings, program).secret, "another secret of the job");
  std::ofstream(file) << "short";
  EXPECT_HAS(refusal([&] { resolve_launch(settings, program); }),
             "holds 5 characters; a secret has at least 16");
  std::filesystem::remove(file);
  EXPECT_HAS(refusal([&] { resolve_launch(settings, program); }), file.string() + " cannot be read");
}

TEST(ResolveLaunch, SeveralMachinesWithoutASecret) {
  LaunchSettings settings;
  settings.num_machines = 2;
  settings.num_processes = 16;
  settings.machine_rank = 0;
  settings.main_process_ip = "10.1.1.1";
  LaunchProgram program = some_program();
  EXPECT_EQ(resolve_launch(settings, program).secret, "");
  program.environment.push_back("TESSERA_REQUIRE_SECRET=0");
  EXPECT_EQ(resolve_launch(settings, program).secret, "");
  program.environment.back() = "TESSERA_REQUIRE_SECRET=1";
  const std::string text = refusal([&] { resolve_launch(settings, program); });
  EXPECT_HAS(text, "TESSERA_REQUIRE_SECRET is set, so several machines need one secret in common");
  EXPECT_HAS(text, "--secret_file");
  settings = {};
  EXPECT_EQ(resolve_launch(settings, program).secret, "");  // one machine: the launcher makes one
}

TEST(ResolveLaunch, FaultsComeAllAtOnce) {
  LaunchSettings settings;
  settings.num_machines = 2;
  settings.main_process_port = 0;
  LaunchProgram program = some_program();
  program.environment.push_back("TESSERA_REQUIRE_SECRET=1");
  program.command = {"no/such/program"};
  const std::string text = refusal([&] { resolve_launch(settings, program); });
  EXPECT_HAS(text, "num_processes (of all machines together) is needed");
  EXPECT_HAS(text, "machine_rank (0 to 1) is needed");
  EXPECT_HAS(text, "main_process_ip (an address of machine 0) is needed");
  EXPECT_HAS(text, "main_process_port 0");
  EXPECT_HAS(text, "--secret_file");
  EXPECT_HAS(text, "program 'no/such/program' does not exist");
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 5) << text;

  LaunchSettings ranges;
  ranges.num_processes = 0;
  ranges.machine_rank = 1;
  ranges.main_process_port = 65536;
  ranges.threads_per_process = -1;
  ranges.grace_s = -1;
  const std::string out = refusal([&] { resolve_launch(ranges, some_program()); });
  for (const char* part : {"num_processes must be from 1 to", "machine_rank must be from 0 to 0, not 1",
                           "main_process_port must be from 0 to 65535, not 65536",
                           "threads_per_process must be", "grace_s must be"}) {
    EXPECT_HAS(out, part);
  }
}

TEST(ResolveLaunch, WithoutAGpu) {
  LaunchSettings settings;
  settings.cpu = true;
  const LaunchOptions options = resolve_launch(settings, some_program());
  EXPECT_EQ(value_of(options.environment, "ACCELERATE_USE_CPU"), "true");
  EXPECT_EQ(value_of(options.environment, "CUDA_VISIBLE_DEVICES"), "");
}

TEST(LocalLaunch, IsQuiet) {
  const LaunchOptions options = local_launch(3, some_program(), "logs");
  EXPECT_EQ(options.num_processes, 3);
  EXPECT_TRUE(options.quiet);
  EXPECT_EQ(options.log_dir, "logs");
}

}  // namespace
}  // namespace tessera
