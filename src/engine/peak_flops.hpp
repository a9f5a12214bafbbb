#pragma once
/// What model FLOP/s are relative to: the peak of the devices, and the rate they show.

#include <optional>
#include <string>
#include <string_view>

#include "tessera/comm/communicator.hpp"

namespace tessera {

struct LoggingConfig;

/// FLOP/s of dense products of `dtype` by the maker's data sheet, of a GPU of that name; fp32 without TF32,
/// as our products are. Nothing for a GPU that is not in the table, a part of one (MIG), and a dtype without
/// tensor cores.
std::optional<double> peak_flops_of(std::string_view device_name, DType dtype);

/// Of all ranks together.
struct FlopRates {
  double measured = 0;         ///< of matrix products at the start
  std::optional<double> peak;  ///< nothing where a rank's GPU is not known: mfu is null then
  std::string note;            ///< a line about the peak, for the log
};

/// Each rank gives the rate it measured; the same result on all. The peak is logging.peak_tflops of each
/// rank, else that of the GPU's data sheet, else, on a CPU, the measured rate. Collective.
FlopRates agree_on_rates(Communicator& world, const ExecCtx& ctx, DType dtype, const LoggingConfig& logging,
                         double measured);

}  // namespace tessera
