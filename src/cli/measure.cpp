/// `tessera env --measure`: the rates that offloading depends on.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <vector>

#include "cli/commands.hpp"
#include "tessera/ops/elementwise.hpp"
#include "tessera/optim/tile_walk.hpp"

namespace tessera::cli {
namespace {

constexpr std::int64_t kElements = std::int64_t{1} << 26;  // of fp32: 256 MiB
constexpr double kBytes = 4.0 * static_cast<double>(kElements);

/// Of five runs, after one that is not counted.
template <typename Run>
double median_seconds(const Run& run) {
  run();
  std::vector<double> seconds;
  for (int i = 0; i < 5; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    run();
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  std::nth_element(seconds.begin(), seconds.begin() + 2, seconds.end());
  return seconds[2];
}

std::string rate(double bytes, double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f GB/s", bytes / seconds / 1e9);
  return text;
}

void print_memory() {
  const ExecCtx ctx = ExecCtx::cpu();
  const Tensor from = Tensor::empty(ctx, {kElements}, DType::f32),
               to = Tensor::empty(ctx, {kElements}, DType::f32);
  ops::fill_zero(ctx, from);
  const double seconds = median_seconds([&] { ops::copy(ctx, from, to); });
  std::cout << "memory       " << rate(2 * kBytes, seconds) << " read and written by a copy" << std::endl;
}

void print_link(int index) {
  const ExecCtx ctx = ExecCtx::cuda(index);
  HostLink link(ctx);
  const auto in = link.memory(static_cast<std::size_t>(kBytes), "the link's measurement"),
             out = link.memory(static_cast<std::size_t>(kBytes), "the link's measurement");
  const Tensor a = Tensor::empty(ctx, {kElements}, DType::f32),
               b = Tensor::empty(ctx, {kElements}, DType::f32);
  ops::fill_zero(ctx, b);
  const double there = median_seconds([&] {
    link.to_device(a.raw(), in.get(), a.nbytes());
    link.synchronize();
  });
  const double back = median_seconds([&] {
    link.to_host(out.get(), b.raw(), b.nbytes());
    link.synchronize();
  });
  const double both = median_seconds([&] {
    link.to_device(a.raw(), in.get(), a.nbytes());
    link.to_host(out.get(), b.raw(), b.nbytes());
    link.synchronize();
  });
  std::cout << "link         GPU" << index << ": " << rate(kBytes, there) << " to the device, "
            << rate(kBytes, back) << " to the host, " << rate(kBytes, both) << " each way at once"
            << std::endl;
}

void print_disk(const std::string& folder) {
  const ExecCtx ctx = ExecCtx::cpu();
  const auto place =
      std::make_shared<OffloadPlace>(ctx, OffloadConfig{.optimizer = OffloadTo::nvme, .path = folder}, 0);
  TileWalk walk(place, {{std::make_shared<OffloadedBuffer>(place, OffloadTo::nvme, "the disk's measurement",
                                                           DType::f32, kElements)}});
  for (const std::string& note : place->notes) std::cout << "disk         " << note << "\n";
  std::vector<std::int64_t> tiles;
  for (std::int64_t i = 0; i * walk.tile() < kElements; ++i) tiles.push_back(i);
  const double seconds =
      median_seconds([&] { walk.walk(tiles, [](std::int64_t, const std::vector<Tensor>&) {}); });
  std::cout << "disk         " << rate(2 * kBytes, seconds) << " read and written in " << folder << std::endl;
}

}  // namespace

void measure_rates(const std::string& disk) {
  print_memory();
  const int devices = cuda_devices().count;
  for (int i = 0; i < devices; ++i) print_link(i);
  if (devices == 0) std::cout << "link         none: there is no GPU\n";
  if (!disk.empty()) print_disk(disk);
}

}  // namespace tessera::cli
