/// A job on the machines of a hostfile: who they are, and what each launcher is told.

#include "launch/hosts.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "launch/environment.hpp"
#include "launch/orders.hpp"
#include "launch_test_support.hpp"

namespace tessera {
namespace {

using namespace launching;

Host host(const std::string& name, std::vector<int> slots, bool picked = false) {
  return {name, std::move(slots), picked};
}

TEST(Hostfile, NamesMachinesAndHowManyProcessesEachTakes) {
  const auto hosts =
      parse_hostfile("host1 slots=2  # eight cards\n\n# nobody\n  node-b.example_2\tslots=3\r\n", "hosts");
  EXPECT_EQ(hosts, (std::vector{host("host1", {0, 1}), host("node-b.example_2", {0, 1, 2})}));
}

TEST(Hostfile, FaultsComeAllAtOnce) {
  const std::string text = refusal([] {
    parse_hostfile(
        "a slots=2\nb\nc slots=two\nd slots=0\na slots=2\n-oProxyCommand=x slots=1\nme@e slots=1\nf slots=1 "
        "g\n...\n"
        "g slots=4097\nslots=4\nh:1 slots=2\n",
        "hosts");
  });
  EXPECT_HAS(text, "hosts:2: must be NAME slots=N\nhosts:3: must be");
  EXPECT_HAS(text, "hosts:4: slots must be from 1 to 4096, not 0");
  EXPECT_HAS(text, "hosts:5: 'a' stands there twice");
  EXPECT_HAS(text, "hosts:6: '-oProxyCommand=x' is no name of a machine");
  EXPECT_HAS(text, "hosts:7: 'me@e' is no name");
  for (const char* line :
       {"8: must be NAME", "9: must be NAME", "10: slots must be", "11: must be", "12: 'h:1' is no name"}) {
    EXPECT_HAS(text, std::string("hosts:") + line);
  }
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 10);
  EXPECT_HAS(refusal([] { parse_hostfile("# nobody\n", "hosts"); }), "hosts: names no machine");
}

TEST(Hostfile, FiltersPickMachinesAndSlots) {
  const std::vector all{host("a", {0, 1, 2}), host("b", {0, 1, 2}), host("c", {0, 1, 2})};
  EXPECT_EQ(pick_hosts(all, "", ""), all);
  EXPECT_EQ(pick_hosts(all, "c@a:2,0", ""), (std::vector{host("a", {0, 2}, true), host("c", {0, 1, 2})}));
  EXPECT_EQ(pick_hosts(all, "a:0,1,2", ""), (std::vector{host("a", {0, 1, 2})}));
  EXPECT_EQ(pick_hosts(all, "", "a@b:1"), (std::vector{host("b", {0, 2}, true), host("c", {0, 1, 2})}));
  EXPECT_EQ(visible_gpus(host("b", {0, 2}, true)), "0,2");
  EXPECT_EQ(visible_gpus(host("b", {0, 1, 2})), std::nullopt);
  EXPECT_HAS(refusal([&] { pick_hosts(all, "a", "b"); }), "not both");
  EXPECT_HAS(refusal([&] { pick_hosts(all, "d", ""); }), "include names 'd', which is not in the hostfile");
  EXPECT_HAS(refusal([&] { pick_hosts(all, "", "a:3"); }),
             "exclude names slot '3' of a, which has the slots 0 to 2");
  EXPECT_HAS(refusal([&] { pick_hosts(all, "a:", ""); }), "names slot ''");
  EXPECT_HAS(refusal([&] { pick_hosts(all, "", "a@b@c"); }), "leaves no machine");
}

class HostSettings : public testing::Test {
 protected:
  HostSettings() { settings_.hostfile = path_; }
  ~HostSettings() override { std::remove(path_.c_str()); }

  std::vector<Host> resolve(const std::string& text) {
    std::ofstream(path_) << text;
    return resolve_hosts(settings_);
  }
  std::string refused(const std::string& text) {
    return refusal([&] { resolve(text); });
  }

  const std::string path_ = testing::TempDir() + "hosts-" + std::to_string(getpid());
  LaunchSettings settings_;
};

TEST_F(HostSettings, AreFilledIn) {
  EXPECT_EQ(resolve("10.1.2.3 slots=4\nb slots=4\n").size(), 2U);
  EXPECT_EQ(settings_.num_machines, 2);
  EXPECT_EQ(settings_.num_processes, 8);
  EXPECT_EQ(settings_.main_process_ip, "10.1.2.3");
}

TEST_F(HostSettings, FewerProcessesAndMachinesAsAskedFor) {
  settings_.num_machines = 2;
  settings_.num_processes = 4;
  settings_.main_process_ip = "10.0.0.1";
  EXPECT_EQ(resolve("a slots=4\nb slots=2\nc slots=1\n"),
            (std::vector{host("a", {0, 1}), host("b", {0, 1})}));
  EXPECT_EQ(settings_.main_process_ip, "10.0.0.1");
}

TEST_F(HostSettings, WhatTheyComeToStandsForTheFile) {
  settings_.machine_rank = 1;
  settings_.exclude = "b:0";
  settings_.num_processes = 2;
  EXPECT_EQ(resolve("10.1.2.3 slots=1\nb slots=2\n").size(), 2U);
  EXPECT_EQ(settings_.environment, std::vector<std::string>{"CUDA_VISIBLE_DEVICES=1"});
  EXPECT_FALSE(settings_.hostfile || settings_.include || settings_.exclude);
}

TEST_F(HostSettings, OfOneMachineNeedNoAddress) {
  EXPECT_EQ(resolve("localhost slots=2\n").size(), 1U);
  EXPECT_EQ(settings_.main_process_ip, std::nullopt);
}

TEST_F(HostSettings, WhatDoesNotFitIsSaid) {
  EXPECT_HAS(refused("a slots=4\nb slots=2\n"),
             "b has 2 slots and a 4: every machine runs as many processes");
  EXPECT_HAS(refused("127.0.0.2 slots=2\nb slots=2\n"), "a loopback address): give --main_process_ip");
  EXPECT_HAS(refused("no.such.invalid slots=2\nb slots=2\n"), "no.such.invalid: ");
  settings_.num_processes = 3;
  EXPECT_HAS(refused("a slots=2\nb slots=2\n"), "num_processes 3 must be a multiple of the 2 machines");
  settings_.num_processes = 6;
  EXPECT_HAS(refused("a slots=4\nb slots=2\n"), "b has 2 slots");
  settings_.num_machines = 3;
  EXPECT_HAS(refused("a slots=4\nb slots=2\n"), "num_machines must be from 1 to the 2 of ");
  settings_.ssh_port = 70000;
  EXPECT_HAS(refused("a slots=4\n"), "ssh_port must be from 1 to 65535, not 70000");
  settings_.ssh_port.reset();
  settings_.hostfile = "/nowhere/hosts";
  EXPECT_HAS(refusal([&] { resolve_hosts(settings_); }), "/nowhere/hosts: cannot be read");
  settings_.hostfile = "/tmp";
  EXPECT_HAS(refusal([&] { resolve_hosts(settings_); }), "/tmp: is a folder");
}

TEST_F(HostSettings, AHostfileReplacesTheMachinesOfAFile) {
  const LaunchSettings file = parse_launch_file(
      "distributed_type: MULTI_GPU\nnum_machines: 1\nnum_processes: 3\nmachine_rank: 0\nmixed_precision: "
      "bf16\n",
      "a.yaml");
  settings_ = overlay(file, settings_);
  EXPECT_EQ(resolve("10.1.2.3 slots=4\nb slots=4\n").size(), 2U);
  EXPECT_EQ(settings_.machine_rank, std::nullopt);
  EXPECT_EQ(settings_.num_processes, 8);
  EXPECT_EQ(settings_.distributed_type, "MULTI_GPU");
}

/// Every setting there is.
LaunchSettings full_settings() {
  LaunchSettings settings = parse_launch_file(
      "launch: {num_processes: 8, num_machines: 2, machine_rank: 1, main_process_ip: 10.0.0.1, "
      "main_process_port: 4000, "
      "hostfile: h, include: a, exclude: b, ssh_port: 23, export_env: 'A,B', max_restarts: 3, "
      "threads_per_process: 4, "
      "log_dir: \"a 'folder' = \\n\", secret_file: s, allow_secret_mode: true, grace_s: 0.1, join_timeout_s: "
      "9, "
      "restart_delay_s: 1e-3, cpu: yes, quiet: false, pin_cores: true}\n",
      "l.yaml");
  settings.distributed_type = "MULTI_GPU";
  settings.environment = {"A=1", "TEXT=two\nlines = and more", "EMPTY="};
  return settings;
}

class Orders : public testing::Test {
 protected:
  Orders() { EXPECT_EQ(pipe(ends_), 0); }
  ~Orders() override {
    close(ends_[0]);
    if (ends_[1] >= 0) close(ends_[1]);
  }
  void say(std::string_view text) {
    EXPECT_EQ(write(ends_[1], text.data(), text.size()), static_cast<ssize_t>(text.size()));
  }
  void hang_up() {
    close(ends_[1]);
    ends_[1] = -1;
  }

  int ends_[2] = {-1, -1};
};

TEST_F(Orders, CarryEverySetting) {
  const LaunchSettings settings = full_settings();
  say(encode_orders(settings) + "x");
  EXPECT_EQ(read_orders(ends_[0]), settings);
  char next = 0;
  EXPECT_EQ(::read(ends_[0], &next, 1), 1);
  EXPECT_EQ(next, 'x') << "what follows is left where it is";
  say(encode_orders({}));
  EXPECT_EQ(read_orders(ends_[0]), LaunchSettings{});
}

TEST_F(Orders, WhatIsNoneIsRefused) {
  using namespace std::string_literals;
  for (const std::string& text :
       {"num_processes=two\0"s, "colour=red\0"s, "num_processes\0"s, "cpu=perhaps\0"s}) {
    say(text);
    EXPECT_HAS(message_of<CommunicationError>([&] { read_orders(ends_[0]); }),
               "which this version does not know");
  }
  say("cpu=true");
  hang_up();
  EXPECT_HAS(message_of<CommunicationError>([&] { read_orders(ends_[0]); }), "is gone");
}

TEST_F(Orders, ThenEveryByteIsASignalAndTheEndIsSigterm) {
  sigset_t watched, old;
  sigemptyset(&watched);
  sigaddset(&watched, SIGUSR2);
  sigaddset(&watched, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &watched, &old);
  const auto comes = [&] {
    int signal_number = 0;
    return sigwait(&watched, &signal_number) == 0 ? signal_number : 0;
  };
  {
    OrderedSignals signals(ends_[0]);
    say(std::string(1, static_cast<char>(SIGUSR2)));
    EXPECT_EQ(comes(), SIGUSR2);
    hang_up();
    EXPECT_EQ(comes(), SIGTERM);
  }
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
}

TEST(HostsJob, EachLauncherIsToldItsPlaceTheSecretAndWhatThisProcessHas) {
  HostsJob job;
  job.hosts = {host("far-1", {0, 1}), host("far-2", {1, 3}, true)};
  job.settings = full_settings();
  job.settings.environment = {"NCCL_DEBUG=WARN"};
  job.settings.warnings = {"said already"};
  job.environment = {"NCCL_DEBUG=INFO", "PYTHONPATH=/a",       "A=1", "B=2", "C=3",
                     "HOME=/root",      "TESSERA_PROGRESS=7:1"};
  job.secret = "0123456789abcdef";
  const LaunchSettings second = settings_of_host(job, 1);
  EXPECT_EQ(second.machine_rank, 1);
  EXPECT_EQ(second.num_processes, 8);
  EXPECT_EQ(second.hostfile, std::nullopt);
  EXPECT_EQ(second.secret_file, std::nullopt);
  EXPECT_TRUE(second.warnings.empty());
  EXPECT_EQ(value_of(second.environment, "NCCL_DEBUG"), "WARN");
  EXPECT_EQ(value_of(second.environment, "PYTHONPATH"), "/a");
  EXPECT_EQ(value_of(second.environment, "A"), "1");
  EXPECT_EQ(value_of(second.environment, "B"), "2");
  EXPECT_EQ(value_of(second.environment, "TESSERA_JOB_SECRET"), job.secret);
  EXPECT_EQ(value_of(second.environment, "CUDA_VISIBLE_DEVICES"), "1,3");
  EXPECT_EQ(second.environment.size(), 6U) << "neither C, HOME nor this process's own pipe";
  EXPECT_EQ(value_of(settings_of_host(job, 0).environment, "CUDA_VISIBLE_DEVICES"), std::nullopt);
  job.settings.export_env = "A,D";
  EXPECT_HAS(refusal([&] { settings_of_host(job, 0); }), "export_env names D, which is not set here");
}

TEST(HostsJob, ACommandKeepsEveryWordAndNoSecret) {
  HostsJob job;
  job.hosts = {host("far-1", {0}), host("localhost", {0})};
  job.settings.ssh_port = 2222;
  job.launcher = {"/opt/tessera", "launch", "it's", "$HOME", "two words"};
  job.folder = "/a b";
  job.secret = "0123456789abcdef";
  const std::string command = "cd '/a b' && exec '/opt/tessera' 'launch' 'it'\\''s' '$HOME' 'two words'";
  EXPECT_EQ(command_of_host(job, 1), (std::vector<std::string>{"/bin/sh", "-c", command}));
  const auto words = command_of_host(job, 0);
  EXPECT_EQ(words.front(), "ssh");
  EXPECT_EQ(words[words.size() - 2], "far-1");
  EXPECT_EQ(words.back(), command);
  EXPECT_NE(std::find(words.begin(), words.end(), "2222"), words.end());
  EXPECT_NE(std::find(words.begin(), words.end(), "BatchMode=yes"), words.end())
      << "nobody answers a question";
}

}  // namespace
}  // namespace tessera
