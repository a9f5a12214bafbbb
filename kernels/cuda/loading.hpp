#pragma once
/// Loading of kernels before they are needed. The runtime loads the code of a kernel at its first launch by
/// default, and may then wait for everything that runs on the device: for ever, if that waits for another
/// rank.

namespace tessera::kernels::cuda {

/// A file of kernels, known by one of them: what the driver calls a module. Made before main().
class KernelFile {
 public:
  explicit KernelFile(const void* kernel);
};

}  // namespace tessera::kernels::cuda

/// Once in every file that launches kernels of its own, with one of them.
#define TESSERA_KERNEL_FILE(...) \
  static const KernelFile kernel_file(reinterpret_cast<const void*>(&__VA_ARGS__))
