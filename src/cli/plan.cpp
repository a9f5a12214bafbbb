#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <memory>
#include <sstream>

#include "cli/commands.hpp"
#include "tessera/engine/plan.hpp"

namespace tessera::cli {
namespace {

/// The layout is possible, but a rank needs more memory than it has.
constexpr int kDoesNotFit = 5;

struct PlanArguments {
  std::string config;
  std::vector<std::string> overrides;
  std::optional<std::int64_t> processes;
  std::optional<double> memory_gb, link_gb_s;
  std::string svg, topology;
  bool json = false;
};

void write_svg(const Plan& plan, const std::string& path) {
  std::ofstream file(path);
  file << to_svg(plan.schedule, plan.times);
  file.close();
  TESSERA_ENSURE(IoError, !file.fail(), path, ": the picture of the schedule cannot be written");
}

/// How GPUs are connected: as a recorded table says, else as those of this machine are, if it has several.
Topology topology_for(const PlanArguments& a, const Config& config) {
  if (!a.topology.empty()) {
    std::ifstream file(a.topology);
    std::ostringstream text;
    text << file.rdbuf();
    TESSERA_ENSURE(IoError, file.good(), "--topology ", a.topology, " cannot be read");
    return parse_topology(text.str(), a.topology);
  }
  if (config.device.type == DeviceChoice::cpu) return {};
  Topology here = machine_topology();
  return here.gpus.size() > 1 ? here : Topology{};
}

void run_plan(const PlanArguments& a, Program& program) {
  TESSERA_ENSURE(ConfigError, !a.processes || *a.processes >= 1, "--processes is ", a.processes.value_or(0),
                 "; at least 1 is needed");
  TESSERA_ENSURE(ConfigError, !a.memory_gb || (*a.memory_gb > 0 && *a.memory_gb < 1e9), "--memory_gb is ",
                 a.memory_gb.value_or(0), "; give the memory of one rank in GB");
  TESSERA_ENSURE(ConfigError, !a.link_gb_s || *a.link_gb_s > 0, "--link_gb_s is ", a.link_gb_s.value_or(0),
                 "; give what crosses a GPU's link each way in a second, in GB");
  Config config = load_config(a.config, a.overrides);
  if (a.memory_gb) config.device.memory_gb = a.memory_gb;
  const Plan plan = make_plan(config, a.processes);
  std::optional<std::int64_t> memory_bytes;
  if (config.device.memory_gb || plan.recompute)
    memory_bytes = memory_limit(config.device, plan.mesh.world()).bytes;
  const std::vector<std::string> warnings = link_warnings(plan, topology_for(a, config));
  if (!a.svg.empty()) write_svg(plan, a.svg);
  std::cout << (a.json ? to_json(plan, memory_bytes) : to_text(plan, memory_bytes)) << std::flush;
  if (a.link_gb_s && !a.json) {
    std::int64_t most = 0;
    for (const RankPlan& rank : plan.ranks)
      most = std::max({most, rank.elsewhere.to_device, rank.elsewhere.to_host});
    char text[128];
    std::snprintf(text, sizeof text,
                  "Offload takes %.3g s of a step at %.3g GB/s each way, beside what is computed.\n",
                  static_cast<double>(most) / (*a.link_gb_s * 1e9), *a.link_gb_s);
    std::cout << text << std::flush;
  }
  for (const std::string& warning : warnings) program.log.warning(warning);
  if (memory_bytes && plan.largest().memory_bytes() > *memory_bytes) program.exit_code = kDoesNotFit;
}

}  // namespace

void add_plan(CLI::App& app, Program& program) {
  auto* command = app.add_subcommand(
      "plan", "Check a layout and show what it costs - memory, communication, bubble - without starting it");
  auto a = std::make_shared<PlanArguments>();
  command->add_option("config", a->config, "configuration file (docs/configuration.md)")->required();
  command->add_option("overrides", a->overrides, "section.key=value, e.g. parallel.tensor=2");
  command->add_option("--processes", a->processes,
                      "processes there are; without it, as many as the layout needs");
  command->add_option("--memory_gb", a->memory_gb,
                      "memory of one rank in GB of 10^9 bytes, in place of device.memory_gb: says whether it "
                      "fits and what to change; exit code 5 if not");
  command->add_option(
      "--link_gb_s", a->link_gb_s,
      "GB/s that cross a GPU's link to host memory each way at once, as `tessera env --measure` "
      "measures it: says what offloading takes of a step");
  command->add_option(
      "--topology", a->topology,
      "how the GPUs of each machine are connected: a file with what `nvidia-smi topo -m` prints "
      "there; without it, this machine's. Warns of tensor ranks that would leave a machine or "
      "an NVLink island");
  command->add_option("--svg", a->svg, "write the pipeline schedule as a picture to this file");
  command->add_flag("--json", a->json, "print everything as JSON");
  command->callback([a, &program] { run_plan(*a, program); });
}

}  // namespace tessera::cli
