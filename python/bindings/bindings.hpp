#pragma once
/// What each file of this folder adds to the module.

#include <pybind11/pybind11.h>

namespace tessera::bindings {

void bind_comm(pybind11::module_& module);
void bind_data(pybind11::module_& module);
void bind_dlpack(pybind11::module_& module);
void bind_engine(pybind11::module_& module);

}  // namespace tessera::bindings
