/// A configuration as Python makes and reads it. Keys, limits and rules are those of the YAML.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "bindings.hpp"
#include "tessera/base/config_file.hpp"

namespace py = pybind11;

namespace tessera::bindings {
namespace {

/// A part of a configuration: what its attributes begin with.
struct Section {
  std::shared_ptr<Config> config;
  std::string name;
};

/// Of {section: {key: value}}. A value is spelled as an override, so that what is wrong with it is said of
/// its key; a section without keys as a file has it.
std::shared_ptr<Config> config_of(const py::dict& sections) {
  const py::object spelled = py::module_::import("json").attr("dumps");
  py::dict others;
  std::vector<std::string> values;
  for (const auto& [section, keys] : sections) {
    if (!py::isinstance<py::dict>(keys) || py::len(keys) == 0) {
      others[section] = keys;
      continue;
    }
    for (const auto& [key, value] : py::cast<py::dict>(keys))
      values.push_back(detail::concat(std::string(py::str(section)), ".", std::string(py::str(key)), "=",
                                      spelled(value).cast<std::string>()));
  }
  return std::make_shared<Config>(
      parse_config(spelled(others).cast<std::string>(), "the configuration", values));
}

/// A value, or the section of this name.
py::object look_up(const std::shared_ptr<Config>& config, const std::string& name) {
  bool is_section = false;
  for (const auto& [key, value] : list_values(*config)) {
    if (key == name) return py::cast(value);
    is_section = is_section || key.starts_with(name + ".");
  }
  if (!is_section) throw py::attribute_error("a configuration has no '" + name + "'");
  return py::cast(Section{config, name});
}

}  // namespace

void bind_config(py::module_& module) {
  py::class_<Section>(module, "ConfigSection", "Its keys are attributes.")
      .def("__getattr__", [](const Section& self, const std::string& name) {
        return look_up(self.config, self.name + "." + name);
      });
  py::class_<Config, std::shared_ptr<Config>>(module, "Config",
                                              "What was checked and resolved; its sections are attributes.")
      .def(py::init(&config_of), py::arg("sections"))
      .def("__getattr__", &look_up)
      .def(
          "__eq__", [](const Config& self, const Config& other) { return self == other; }, py::is_operator())
      .def("__repr__", [](const Config& self) { return to_yaml(self); })
      .def(
          "values",
          [](const Config& self) {
            py::dict values;
            for (const auto& [key, value] : list_values(self)) values[py::str(key)] = value;
            return values;
          },
          "All of them, by section.key.");
}

}  // namespace tessera::bindings
