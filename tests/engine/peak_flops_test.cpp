#include "engine/peak_flops.hpp"

#include <gtest/gtest.h>

#include <mutex>

#include "tessera/base/config.hpp"
#include "tests/support/ranks.hpp"

namespace tessera::test {
namespace {

/// Names as drivers give them, figures as data sheets do.
TEST(PeakFlops, KnowsGpusByTheNamesOfTheirDrivers) {
  const struct {
    const char* name;
    double bf16, fp32;
  } known[] = {
      {"NVIDIA A100-SXM4-80GB", 312e12, 19.5e12},
      {"NVIDIA A100 80GB PCIe", 312e12, 19.5e12},
      {"NVIDIA A10", 125e12, 31.2e12},
      {"NVIDIA H100 80GB HBM3", 989.4e12, 66.9e12},
      {"NVIDIA H100 PCIe", 756e12, 51.2e12},
      {"NVIDIA H100 NVL", 835.5e12, 60e12},
      {"NVIDIA H200", 989.4e12, 66.9e12},
      {"NVIDIA H20", 148e12, 44e12},
      {"NVIDIA GH200 480GB", 989.4e12, 66.9e12},
      {"NVIDIA B200", 2250e12, 75e12},
      {"NVIDIA L40S", 362e12, 91.6e12},
      {"NVIDIA L4", 121e12, 30.3e12},
  };
  for (const auto& gpu : known) {
    EXPECT_DOUBLE_EQ(peak_flops_of(gpu.name, DType::bf16).value_or(0), gpu.bf16) << gpu.name;
    EXPECT_DOUBLE_EQ(peak_flops_of(gpu.name, DType::f32).value_or(0), gpu.fp32) << gpu.name;
  }
  EXPECT_DOUBLE_EQ(peak_flops_of("Tesla V100-SXM2-32GB", DType::f16).value_or(0), 125e12);
  EXPECT_DOUBLE_EQ(peak_flops_of("Tesla V100-PCIE-16GB", DType::f16).value_or(0), 112e12);
}

TEST(PeakFlops, GuessesNothing) {
  EXPECT_EQ(peak_flops_of("Tesla V100-SXM2-32GB", DType::bf16), std::nullopt);  // has no such tensor cores
  for (const char* name :
       {"NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A10G", "NVIDIA H2000", "", "Emulated"})
    EXPECT_EQ(peak_flops_of(name, DType::f32), std::nullopt) << name;
}

TEST(PeakFlops, OnACpuThePeakIsTheMeasuredRateUnlessItIsGiven) {
  std::mutex mutex;
  run_local(3, {.timeout_s = 60}, [&](std::shared_ptr<Communicator> world) {
    const ExecCtx ctx = ExecCtx::cpu(1);
    const FlopRates measured = agree_on_rates(*world, ctx, DType::f32, {}, 1e9 * (world->rank() + 1));
    const FlopRates given = agree_on_rates(*world, ctx, DType::f32, {.peak_tflops = 2.5}, 1e9);
    const std::lock_guard lock(mutex);
    EXPECT_EQ(measured.measured, 6e9);
    EXPECT_EQ(measured.peak, 6e9);
    EXPECT_NE(measured.note.find("a CPU's peak is not known"), std::string::npos) << measured.note;
    EXPECT_EQ(given.measured, 3e9);
    EXPECT_EQ(given.peak, 7.5e12);
    EXPECT_NE(given.note.find("logging.peak_tflops, 2.5 TFLOP/s a rank"), std::string::npos) << given.note;
  });
}

}  // namespace
}  // namespace tessera::test
