#include "tessera/engine/tune.hpp"

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <memory>

#include "cli/commands.hpp"
#include "tessera/base/config_file.hpp"
#include "tessera/engine/build.hpp"

namespace tessera::cli {
namespace {

struct TuneArguments {
  std::string config;
  std::vector<std::string> overrides;
  std::string output;
};

/// The GPU to time on. A configuration that would train on the CPU is refused, whatever the reason.
Device gpu_of(const DeviceConfig& config) {
  const CudaDevices cuda = cuda_devices();
  TESSERA_ENSURE(ConfigError, cuda.count > 0, "tessera tune times matrix products on a GPU, and ",
                 cuda.why_none, ". Run it on a machine like those you will train on");
  TESSERA_ENSURE(
      ConfigError, config.type != DeviceChoice::cpu,
      "tessera tune times matrix products on a GPU, and device.type is cpu: give device.type=cuda");
  return device_of(config);
}

std::string table_of(const TuneArguments& a, const Config& config, const Environment& environment) {
  const std::string path =
      !a.output.empty() ? a.output : config.device.gemm_cache.value_or(default_gemm_table(environment));
  TESSERA_ENSURE(
      ConfigError, !path.empty(),
      "there is no folder for this user's files (XDG_CACHE_HOME, HOME): name the table with --output");
  return path;
}

constexpr const char* kFormat = "%-38s %-18s %-22s %10s %9s %10s\n";

void print_head() { std::printf(kFormat, "product, m x n x k", "dtype", "with", "time", "TFLOP/s", "gain"); }

std::string text_of(const char* format, double value) {
  char text[32];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

void print(const ops::RecordedProduct& product, const ops::ProductTrial& trial) {
  const std::string with = product.fused + (trial.separate ? " (separate)" : "");
  if (trial.known) {
    std::printf(kFormat, product.shape.c_str(), product.dtypes.c_str(), with.c_str(), "known", "-", "-");
  } else {
    std::printf(kFormat, product.shape.c_str(), product.dtypes.c_str(), with.c_str(),
                text_of("%.1f us", 1e6 * trial.best_s).c_str(),
                text_of("%.1f", 1e-12 * product.flops / trial.best_s).c_str(),
                text_of("%.1f %%", 100 * (trial.first_s / trial.best_s - 1)).c_str());
  }
  std::fflush(stdout);
}

/// What all products of the recorded steps gain together.
struct Gain {
  double first_s = 0, best_s = 0;
  void add(const ops::RecordedProduct& product, const ops::ProductTrial& trial) {
    first_s += static_cast<double>(product.count) * trial.first_s;
    best_s += static_cast<double>(product.count) * trial.best_s;
  }
};

void run_tune(const TuneArguments& a, const Program& program) {
  const Config config = load_config(a.config, a.overrides);
  const Device device = gpu_of(config.device);
  const std::string output = table_of(a, config, program.environment);
  const auto products = products_of(config, device);
  print_head();
  Gain gain;
  const std::int64_t timed =
      tune_products(ExecCtx::cuda(device.index), products, output,
                    [&](const ops::RecordedProduct& product, const ops::ProductTrial& trial) {
                      gain.add(product, trial);
                      print(product, trial);
                    });
  std::cout << products.size() << " products, " << timed << " of them timed";
  if (gain.best_s > 0)
    std::cout << "; together " << text_of("%.1f %%", 100 * (gain.first_s / gain.best_s - 1))
              << " faster than cuBLASLt's first suggestions";
  std::cout << "\n" << output << std::endl;
  const auto found = gemm_tables(program.environment);
  if (config.device.gemm_cache.value_or("") != output &&
      std::find(found.begin(), found.end(), output) == found.end())
    std::cout << "training uses it with device.gemm_cache=" << output << std::endl;
}

}  // namespace

void add_tune(CLI::App& app, Program& program) {
  auto* command = app.add_subcommand(
      "tune", "Find the fastest way of every matrix product of a training, once per GPU; training uses it");
  auto a = std::make_shared<TuneArguments>();
  command->add_option("config", a->config, "configuration file (docs/configuration.md)")->required();
  command->add_option("overrides", a->overrides, "section.key=value, e.g. training.micro_batch_size=8");
  command->add_option(
      "--output", a->output,
      "the table; goes on where it ends (default: device.gemm_cache, else "
      "tessera/gemm_table.txt in XDG_CACHE_HOME or ~/.cache, where training looks by itself)");
  command->callback([a, &program] { run_tune(*a, program); });
}

}  // namespace tessera::cli
