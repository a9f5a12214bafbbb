#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "tessera/cli/cli.hpp"

namespace py = pybind11;

PYBIND11_MODULE(_C, module) {
  module.doc() = "Tessera's C++ side.";
  // A run lasts hours: the interpreter lock is released, and SIGINT belongs to the C++ side meanwhile.
  module.def(
      "cli_main",
      [](const std::vector<std::string>& args) {
        py::gil_scoped_release release;
        return tessera::cli_main(args);
      },
      py::arg("args"), "Runs the command line `tessera ARGS...`; returns its exit code.");
}
