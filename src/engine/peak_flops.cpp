#include "engine/peak_flops.hpp"

#include <algorithm>
#include <cstdio>
#include <set>

#include "tessera/base/config.hpp"
#include "tessera/comm/bytes.hpp"

namespace tessera {
namespace {

/// TFLOP/s without sparsity; 0 = it has no such tensor cores.
struct Peak {
  std::string_view word, also;  ///< both are in the name
  double bf16, fp16, fp32;
};

/// From NVIDIA's data sheets; the first row that fits.
constexpr Peak kPeaks[] = {
    {"GB300", "", 2500, 2500, 80},    {"GB200", "", 2500, 2500, 80},     {"B300", "", 2250, 2250, 75},
    {"B200", "", 2250, 2250, 75},     {"GH200", "", 989.4, 989.4, 66.9}, {"H200", "NVL", 835.5, 835.5, 60},
    {"H200", "", 989.4, 989.4, 66.9}, {"H100", "PCIe", 756, 756, 51.2},  {"H100", "NVL", 835.5, 835.5, 60},
    {"H100", "", 989.4, 989.4, 66.9}, {"H800", "PCIe", 756, 756, 51.2},  {"H800", "", 989.4, 989.4, 66.9},
    {"H20", "", 148, 148, 44},        {"A100", "", 312, 312, 19.5},      {"A800", "", 312, 312, 19.5},
    {"A40", "", 149.7, 149.7, 37.4},  {"A30", "", 165, 165, 10.3},       {"A10", "", 125, 125, 31.2},
    {"L40S", "", 362, 362, 91.6},     {"L40", "", 181, 181, 90.5},       {"L4", "", 121, 121, 30.3},
    {"V100", "PCIE", 0, 112, 14},     {"V100", "", 0, 125, 15.7},        {"T4", "", 0, 65, 8.1},
};

std::set<std::string_view> words_of(std::string_view name) {
  std::set<std::string_view> words;
  while (!name.empty()) {
    const std::size_t end = std::min(name.find_first_of(" -,/"), name.size());
    if (end > 0) words.insert(name.substr(0, end));
    name.remove_prefix(std::min(end + 1, name.size()));
  }
  return words;
}

std::string tera(double flops) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4g TFLOP/s", flops / 1e12);
  return text;
}

/// The peak of this rank's device, and where it is from; without one, why.
std::pair<std::optional<double>, std::string> own_peak(const ExecCtx& ctx, DType dtype,
                                                       const LoggingConfig& logging, double measured) {
  if (logging.peak_tflops)
    return {*logging.peak_tflops * 1e12,
            "mfu is of logging.peak_tflops, " + tera(*logging.peak_tflops * 1e12) + " a rank"};
  if (ctx.device().is_cpu()) {
    return {
        measured,
        "mfu is of the measured rate of matrix products, as mfu_of_measured is: a CPU's peak is not known"};
  }
  const std::string described = describe_cuda_device(ctx.device().index);
  const std::string name = described.substr(0, described.find(','));
  const std::optional<double> peak = peak_flops_of(name, dtype);
  if (!peak) {
    return {peak,
            detail::concat("the peak of ", name, " for products of ", dtype,
                           " is not known: mfu is null, and mfu_of_measured is relative to the measured "
                           "rate. Give the data sheet's figure in logging.peak_tflops")};
  }
  return {peak,
          detail::concat("mfu is of the peak of ", name, ", ", tera(*peak), " for products of ", dtype)};
}

}  // namespace

std::optional<double> peak_flops_of(std::string_view device_name, DType dtype) {
  const std::set<std::string_view> words = words_of(device_name);
  if (words.contains("MIG")) return std::nullopt;
  for (const Peak& row : kPeaks) {
    if (!words.contains(row.word) || !(row.also.empty() || words.contains(row.also))) continue;
    const double tflops = dtype == DType::bf16 ? row.bf16 : dtype == DType::f16 ? row.fp16 : row.fp32;
    if (tflops > 0) return tflops * 1e12;
    return std::nullopt;
  }
  return std::nullopt;
}

FlopRates agree_on_rates(Communicator& world, const ExecCtx& ctx, DType dtype, const LoggingConfig& logging,
                         double measured) {
  const auto [peak, note] = own_peak(ctx, dtype, logging, measured);
  FlopRates rates{.measured = 0, .peak = 0.0, .note = {}};
  for (const std::string& each :
       all_gather_bytes(world, detail::concat(measured, " ", peak.value_or(0), " ", note))) {
    std::size_t end = 0;
    rates.measured += std::stod(each, &end);
    const std::string rest = each.substr(end);
    const double of_rank = std::stod(rest, &end);
    if (of_rank > 0 && rates.peak) {
      *rates.peak += of_rank;
      if (rates.note.empty()) rates.note = rest.substr(end + 1);
    } else if (rates.peak) {  // the first rank without one says why there is none
      rates.peak.reset();
      rates.note = rest.substr(end + 1);
    }
  }
  return rates;
}

}  // namespace tessera
