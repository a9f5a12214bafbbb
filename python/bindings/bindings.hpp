#pragma once
/// What each file of this folder adds to the module.

#include <pybind11/pybind11.h>

#include <functional>
#include <string>

namespace tessera::bindings {

/// A Python function that says where in a script a call stands, or None, for meet(). It is not kept: `place`
/// must outlive the result.
std::function<std::string()> place_of_call(const pybind11::object& place);

/// Where an architecture (the text of a config.json, or of the object `model` of a tessera.json) came from.
inline constexpr const char* kOrigin = "the model's config";

/// `fn()` without the interpreter lock.
template <typename Fn>
auto unlocked(Fn&& fn) {
  const pybind11::gil_scoped_release release;
  return fn();
}

void bind_architecture(pybind11::module_& module);
void bind_checkpoint(pybind11::module_& module);
void bind_comm(pybind11::module_& module);
void bind_config(pybind11::module_& module);
void bind_data(pybind11::module_& module);
void bind_dlpack(pybind11::module_& module);
void bind_engine(pybind11::module_& module);
void bind_flight(pybind11::module_& module);
void bind_generation(pybind11::module_& module);
void bind_samples(pybind11::module_& module);

}  // namespace tessera::bindings
