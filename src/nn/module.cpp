#include "tessera/nn/module.hpp"

namespace tessera {

std::vector<Parameter*> Module::parameters() {
  std::vector<Parameter*> list;
  for (const Entry& entry : entries_) {
    if (entry.parameter) {
      list.push_back(entry.parameter.get());
    } else {
      const auto inner = entry.module->parameters();
      list.insert(list.end(), inner.begin(), inner.end());
    }
  }
  return list;
}

Parameter& Module::parameter(const std::string& local, Placement placement, Init init,
                             ParameterTraits traits) {
  entries_.push_back(
      {std::make_unique<Parameter>(child_name(local), std::move(placement), init, traits), nullptr});
  return *entries_.back().parameter;
}

}  // namespace tessera
