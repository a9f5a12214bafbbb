#include <thread>

#include <iostream>

#include "cli/commands.hpp"
#include "tessera/base/version.hpp"
#include "tessera/device/exec_ctx.hpp"
#include "tessera/device/topology.hpp"
#include "tessera/ops/backends.hpp"

namespace tessera::cli {

namespace {

/// How the GPUs of this machine are connected; `devices` may be fewer.
void print_links(const CudaDevices& devices) {
  const Topology topology = machine_topology();
  for (std::size_t i = 0; i < topology.gpus.size(); ++i) {
    const GpuPlace& gpu = topology.gpus[i];
    std::cout << (i == 0 ? "links        GPU" : "             GPU") << i << " is " << gpu.name << ", "
              << gpu.pci << "\n";
  }
  if (!topology.gpus.empty()) {
    std::cout << to_text(topology);
  } else if (devices.count > 0) {
    std::cout << "links        not known: " << topology.why_none << "\n";
  }
}

void print_numa_nodes() {
  for (const NumaNode& node : numa_nodes())
    std::cout << (node.number == 0 ? "numa         " : "             ") << "node " << node.number << ": CPUs "
              << node.cpus << "\n";
}

}  // namespace

void add_env(CLI::App& app, Program& program) {
  auto* command = app.add_subcommand("env", "Print versions, CPU and backends: paste this into bug reports");
  struct Asked {
    bool measure = false;
    std::string disk;
  };
  auto asked = std::make_shared<Asked>();
  auto* measure =
      command->add_flag("--measure", asked->measure,
                        "measure memory and the links of GPUs to it, as `offload` uses them (seconds)");
  command->add_option("--disk", asked->disk, "with --measure: also a disk, in this folder (offload.path)")
      ->needs(measure);
  command->callback([&program, asked] {
    std::cout << "tessera      " << version() << "\n";
    std::cout << "compiler     " << __VERSION__ << "\n";
    for (const auto& [name, value] : ops::describe_backends()) {
      std::cout << name << std::string(name.size() < 13 ? 13 - name.size() : 1, ' ') << value << "\n";
    }
    const CudaDevices devices = cuda_devices();
    if (devices.count == 0) std::cout << "gpus         none: " << devices.why_none << "\n";
    std::cout << "threads      " << ExecCtx::cpu().stream->threads() << " of "
              << std::thread::hardware_concurrency() << "\n";
    print_links(devices);
    print_numa_nodes();
    const Environment& e = program.environment;
    if (e.launched()) std::cout << "rank         " << *e.rank << " of " << *e.world_size << "\n";
    std::cout << std::flush;
    const std::string python = e.python.value_or("python3");
    if (run_python(python, "packages", {}, /*quiet=*/true) != 0) {
      std::cout << "python       " << python << " does not run the package tessera (`" << python
                << " -m tessera packages` says why)" << std::endl;
    }
    if (asked->measure) measure_rates(asked->disk);
  });
}

}  // namespace tessera::cli
