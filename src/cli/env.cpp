#include <thread>

#include <iostream>

#include "cli/commands.hpp"
#include "tessera/base/version.hpp"
#include "tessera/device/exec_ctx.hpp"
#include "tessera/ops/backends.hpp"

namespace tessera::cli {

void add_env(CLI::App& app, Program& program) {
  auto* command = app.add_subcommand("env", "Print versions, CPU and backends: paste this into bug reports");
  command->callback([&program] {
    std::cout << "tessera      " << version() << "\n";
    std::cout << "compiler     " << __VERSION__ << "\n";
    for (const auto& [name, value] : ops::describe_backends()) {
      std::cout << name << std::string(name.size() < 13 ? 13 - name.size() : 1, ' ') << value << "\n";
    }
    const CudaDevices devices = cuda_devices();
    if (devices.count == 0) std::cout << "gpus         none: " << devices.why_none << "\n";
    std::cout << "threads      " << ExecCtx::cpu().stream->threads() << " of "
              << std::thread::hardware_concurrency() << "\n";
    const Environment& e = program.environment;
    if (e.launched()) std::cout << "rank         " << *e.rank << " of " << *e.world_size << "\n";
    std::cout << std::flush;
    const std::string python = e.python.value_or("python3");
    if (run_python(python, "packages", {}, /*quiet=*/true) != 0) {
      std::cout << "python       " << python << " does not run the package tessera (`" << python
                << " -m tessera packages` says why)" << std::endl;
    }
  });
}

}  // namespace tessera::cli
