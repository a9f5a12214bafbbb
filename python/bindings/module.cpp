#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <signal.h>

#include <string>
#include <vector>

#include "bindings.hpp"
#include "tessera/base/env.hpp"
#include "tessera/base/error.hpp"
#include "tessera/base/exit_codes.hpp"
#include "tessera/cli/cli.hpp"
#include "tessera/comm/timeout.hpp"
#include "tessera/device/exec_ctx.hpp"

namespace py = pybind11;

namespace tessera::bindings {
namespace {

/// Signal handlers of Python run on this stack while C++ computes: libraries there point the stack pointer
/// at memory of their own.
void give_signals_a_stack() {
  stack_t now{};
  if (sigaltstack(nullptr, &now) != 0 || (now.ss_flags & SS_DISABLE) == 0) return;
  static std::vector<char> memory(64 * 1024);
  stack_t own{};
  own.ss_sp = memory.data();
  own.ss_size = memory.size();
  sigaltstack(&own, nullptr);
}

/// Python's exceptions for tessera::Error and its kinds; those that mean what one of Python's own means are
/// that as well.
void bind_errors(py::module_& module) {
  const auto base = py::register_exception<Error>(module, "Error", PyExc_RuntimeError);
  const auto both = [&](PyObject* python) { return py::make_tuple(base, py::handle(python)); };
  py::register_exception<InvalidArgument>(module, "InvalidArgument", both(PyExc_ValueError));
  py::register_exception<ConfigError>(module, "ConfigError", both(PyExc_ValueError));
  py::register_exception<DataError>(module, "DataError", base);
  py::register_exception<CheckpointError>(module, "CheckpointError", base);
  py::register_exception<IoError>(module, "IoError", both(PyExc_OSError));
  py::register_exception<DeviceError>(module, "DeviceError", base);
  const auto lost = py::register_exception<CommunicationError>(module, "CommunicationError", base);
  py::register_exception<CommunicationTimeout>(module, "CommunicationTimeout", lost);
  py::register_exception<TrainingError>(module, "TrainingError", base);
  py::register_exception<InternalError>(module, "InternalError", base);
}

py::dict environment() {
  const Environment env = read_environment();
  py::dict result;
  result["rank"] = env.rank;
  result["world_size"] = env.world_size;
  result["local_rank"] = env.local_rank;
  result["local_world_size"] = env.local_world_size;
  result["launched"] = env.launched();
  result["restart"] = env.restart;
  result["threads"] = env.threads;
  result["warnings"] = env.warnings;
  return result;
}

std::vector<std::string> device_names() {
  std::vector<std::string> names;
  const CudaDevices devices = cuda_devices();
  for (int i = 0; i < devices.count; ++i) names.push_back(describe_cuda_device(i));
  return names;
}

}  // namespace
}  // namespace tessera::bindings

PYBIND11_MODULE(_C, module) {
  using namespace tessera;
  using namespace tessera::bindings;
  module.doc() = "Tessera's C++ side.";
  give_signals_a_stack();
  bind_errors(module);
  bind_config(module);
  bind_architecture(module);
  bind_checkpoint(module);
  bind_comm(module);
  bind_data(module);
  bind_dlpack(module);
  bind_engine(module);
  bind_flight(module);
  bind_generation(module);
  bind_samples(module);
  module.def("environment", &environment, "What a launcher told this process.");
  module.def(
      "exit_codes",
      [] {
        py::dict codes;
        for (const auto& row : exit_code::table()) codes[py::int_(row.code)] = row.meaning;
        return codes;
      },
      "How jobs end: what each exit code means.");
  module.def("cuda_devices", &device_names, "Names of the GPUs this process can use.");
  // A run lasts hours: the interpreter lock is released, and SIGINT belongs to the C++ side meanwhile.
  module.def(
      "cli_main",
      [](const std::vector<std::string>& args, const std::vector<std::string>& self) {
        return cli_main(args, self);
      },
      py::arg("args"), py::arg("self") = std::vector<std::string>(), py::call_guard<py::gil_scoped_release>(),
      "Runs the command line `tessera ARGS...`; returns its exit code.");
}
