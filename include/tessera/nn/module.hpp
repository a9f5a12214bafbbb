#pragma once
/// Modules own parameters and other modules. They compute; they know nothing of optimizers, files or
/// schedules.

#include <memory>
#include <string>
#include <vector>

#include "tessera/autograd/parameter.hpp"

namespace tessera {

class Module {
 public:
  explicit Module(std::string name) : name_(std::move(name)) {}
  virtual ~Module() = default;
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  /// Full name: the prefix of its parameters' names.
  const std::string& name() const { return name_; }
  /// All parameters, own and of sub-modules, in order of construction.
  std::vector<Parameter*> parameters();

 protected:
  /// Declares a parameter called name().`local`.
  Parameter& parameter(const std::string& local, Placement placement, Init init, ParameterTraits traits = {});
  Parameter& parameter(const std::string& local, Shape shape, Init init, ParameterTraits traits = {}) {
    return parameter(local, Placement::replicated(shape), init, traits);
  }
  /// Constructs a sub-module M(name().`local`, args...).
  template <typename M, typename... Args>
  M& submodule(const std::string& local, Args&&... args) {
    auto owned = std::make_unique<M>(child_name(local), std::forward<Args>(args)...);
    M& module = *owned;
    entries_.push_back({nullptr, std::move(owned)});
    return module;
  }

 private:
  struct Entry {
    std::unique_ptr<Parameter> parameter;
    std::unique_ptr<Module> module;
  };
  std::string child_name(const std::string& local) const {
    return name_.empty() ? local : name_ + "." + local;
  }

  std::string name_;
  std::vector<Entry> entries_;
};

}  // namespace tessera
