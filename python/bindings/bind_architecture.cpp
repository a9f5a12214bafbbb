/// What the rows of families and an architecture say, for Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "tessera/base/config_file.hpp"
#include "tessera/base/families.hpp"
#include "tessera/checkpoint/hf.hpp"
#include "tessera/engine/pretrained.hpp"
#include "tessera/engine/weight_fit.hpp"

namespace py = pybind11;

namespace tessera::bindings {
namespace {

py::list parameters_of(const std::string& architecture) {
  py::list list;
  for (const HfMapping& mapping : hf_module_mappings(parse_architecture(architecture, kOrigin))) {
    py::list parts;
    for (const HfPart& part : mapping.parts)
      parts.append(py::make_tuple(
          part.name,
          py::tuple(py::cast(std::vector<std::int64_t>(part.shape.dims().begin(), part.shape.dims().end()))),
          part.transposed, part.member < 0 ? py::object(py::none()) : py::object(py::cast(part.member))));
    list.append(py::make_tuple(mapping.name, parts));
  }
  return list;
}

std::map<std::string, std::vector<std::int64_t>> row_orders(const std::string& architecture) {
  std::map<std::string, std::vector<std::int64_t>> orders;
  for (const HfMapping& mapping : hf_mappings(parse_architecture(architecture, kOrigin))) {
    for (const HfPart& part : mapping.parts) {
      for (std::int64_t row = 0; part.groups > 0 && row < part.shape[0]; ++row)
        orders[part.name].push_back(stored_row(part, row));
    }
  }
  return orders;
}

const ModelSpec& row_of(const std::string& type) {
  const ModelSpec* row = find_spec(type);
  TESSERA_CHECK(row != nullptr, "no model type '", type, "' is known");
  return *row;
}

/// The model section for an architecture.
py::dict model_items(const std::string& architecture) {
  Settings config;
  config.model = parse_architecture(architecture, kOrigin).model;
  py::dict items;
  for (const auto& [key, value] : list_values(config)) {
    if (key.starts_with("model.")) items[py::str(key.substr(6))] = value;
  }
  return items;
}

/// The architecture of a configuration's model, with its tensors named as those of another one.
std::string changed_model(const std::string& architecture, const Config& config) {
  Architecture after = architecture_of(config.model);
  after.type = parse_architecture(architecture, kOrigin).type;
  return to_model_json(after);
}

/// The parameters of Transformers' modules that these tensors of a folder are in.
std::vector<std::string> in_modules(const Architecture& architecture, const std::vector<std::string>& names) {
  const std::vector<HfMapping> files = hf_mappings(architecture), modules = hf_module_mappings(architecture);
  std::map<std::string, std::string> module_of;
  for (std::size_t i = 0; i < files.size(); ++i) {
    const bool alike = files[i].parts.size() == modules[i].parts.size();
    for (std::size_t j = 0; j < files[i].parts.size(); ++j)
      module_of[files[i].parts[j].name] = modules[i].parts[alike ? j : 0].name;
  }
  std::vector<std::string> list;
  for (const std::string& name : names) {
    const std::string& module = module_of.at(name);
    if (std::find(list.begin(), list.end(), module) == list.end()) list.push_back(module);
  }
  return list;
}

/// The names of Transformers' parameters of what is drawn and of what is left out when a model is made of
/// another's weights, and a sentence about them.
std::tuple<std::vector<std::string>, std::vector<std::string>, std::string> fit_of(const std::string& before,
                                                                                   const std::string& after) {
  const Architecture from = parse_architecture(before, kOrigin);
  Architecture to = parse_architecture(after, kOrigin);
  const WeightFit fit = weight_fit(from, to);
  to.type = from.type;  // by whose names that went
  return {in_modules(to, fit.drawn), in_modules(from, fit.dropped), fit.text()};
}

}  // namespace

void bind_architecture(py::module_& module) {
  module.def("hf_model_types", &hf_model_types, "Those that prepare() takes.");
  module.def(
      "hf_attributes",
      [](const std::string& type) {
        std::vector<std::pair<std::string, std::string>> list;
        for (const HfAttribute& each : row_of(type).attributes) list.emplace_back(each.field, each.path);
        return list;
      },
      py::arg("model_type"));
  module.def(
      "hf_head", [](const std::string& type) { return std::string(row_of(type).names.head) + ".weight"; },
      py::arg("model_type"));
  module.def(
      "hf_megatron_tokenizer",
      [](const std::string& type) { return std::string(row_of(type).megatron_tokenizer); },
      py::arg("model_type"));
  module.def(
      "hf_model_type",
      [](const std::string& architecture) {
        return hf_model_type_of(parse_architecture(architecture, kOrigin));
      },
      py::arg("architecture"));
  module.def("hf_model_items", &model_items, py::arg("architecture"));
  module.def("hf_parameters", &parameters_of, py::arg("architecture"));
  module.def("hf_row_orders", &row_orders, py::arg("architecture"),
             "Where each of Tessera's rows is stored.");
  module.def("changed_model", &changed_model, py::arg("architecture"), py::arg("config"));
  module.def("weight_fit", &fit_of, py::arg("before"), py::arg("after"));
}

}  // namespace tessera::bindings
