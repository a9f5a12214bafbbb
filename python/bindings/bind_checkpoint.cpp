/// Saving files and folders whole, and reading safetensors files, for Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>
#include <unistd.h>

#include <memory>
#include <optional>
#include <span>
#include <string>

#include "bindings.hpp"
#include "tessera/checkpoint/checkpoint.hpp"
#include "tessera/checkpoint/hf.hpp"
#include "tessera/checkpoint/safetensors.hpp"
#include "tessera/checkpoint/staged_directory.hpp"
#include "tessera/comm/heartbeat.hpp"
#include "tessera/engine/run_lock.hpp"

namespace py = pybind11;

namespace tessera::bindings {
namespace {

namespace fs = std::filesystem;
using Released = py::call_guard<py::gil_scoped_release>;

std::span<const std::byte> bytes_of(const py::buffer_info& info) {
  TESSERA_CHECK(info.ndim == 1 && info.itemsize == 1, "bytes are wanted, not an array of ", info.ndim,
                " dimensions with elements of ", info.itemsize, " bytes");
  return {static_cast<const std::byte*>(info.ptr), static_cast<std::size_t>(info.size)};
}

void publish_bytes(const fs::path& path, const py::buffer& data) {
  const py::buffer_info info = data.request();
  const std::span<const std::byte> bytes = bytes_of(info);
  const py::gil_scoped_release release;
  publish_file(path, bytes);
}

/// The tensors of a whole safetensors file in memory: (name, format's dtype, shape, first byte, byte behind
/// the last).
py::list safetensors_entries(const py::buffer& data, const std::string& origin) {
  const py::buffer_info info = data.request();
  py::list list;
  for (const SafetensorsTensor& tensor : safetensors_in_memory(bytes_of(info), origin))
    list.append(py::make_tuple(tensor.name, tensor.type, py::tuple(py::cast(tensor.shape)), tensor.begin,
                               tensor.end));
  return list;
}

/// The name and the text of the file that describes a model folder.
std::pair<std::string, std::string> model_description(const fs::path& folder, bool follow_symlinks) {
  ModelDescription found =
      read_model_description(folder, follow_symlinks ? SymbolicLinks::follow : SymbolicLinks::within_folder);
  return {found.is_tessera ? "tessera.json" : "config.json", std::move(found.text)};
}

/// The lease of a folder. A child that was forked has no thread that counts for it, and gives nothing back.
class Lease {
 public:
  Lease(const fs::path& folder, const std::shared_ptr<Communicator>& world)
      : lock_(std::make_unique<RunLock>(folder, Logger(), RunLockTimes{}, [&world] { heartbeat(*world); })) {}
  ~Lease() { close(); }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  void check() {
    TESSERA_CHECK(lock_ && getpid() == pid_, "this lease was given back, or is another process's");
    lock_->check_still_ours();
  }
  void close() {
    if (getpid() != pid_) static_cast<void>(lock_.release());
    lock_.reset();
  }

 private:
  pid_t pid_ = getpid();
  std::unique_ptr<RunLock> lock_;
};

/// Who of this machine works in a folder, in words; empty: nobody.
std::string holder_of(const fs::path& folder) {
  try {
    RunLock::refuse_if_held(folder);
    return "";
  } catch (const ConfigError& error) {
    return error.what();
  }
}

/// The newest whole checkpoint of a folder, or None, and why newer ones were passed over.
std::pair<std::optional<fs::path>, std::vector<std::string>> newest_checkpoint(const fs::path& root) {
  FoundCheckpoint found = find_latest(root);
  return {std::move(found.dir), std::move(found.problems)};
}

}  // namespace

void bind_checkpoint(py::module_& module) {
  py::enum_<Existing>(module, "Existing")
      .value("refuse", Existing::refuse)
      .value("replace", Existing::replace)
      .value("update", Existing::update);
  py::class_<StagedDirectory>(module, "StagedDirectory",
                              "A folder while it is written; publish() puts it in place, whole.")
      .def(py::init<fs::path, Existing>(), py::arg("target"), py::arg("existing") = Existing::replace,
           Released())
      .def_property_readonly("path", [](const StagedDirectory& self) { return self.path(); })
      .def(
          "publish",
          [](StagedDirectory& self) {
            self.sync();  // Python and the packages that write here do not
            self.publish();
          },
          Released());
  py::class_<Lease>(module, "Lease", "A folder is this process's to save into, until close() or its end.")
      .def(py::init<fs::path, std::shared_ptr<Communicator>>(), py::arg("folder"), py::arg("world"),
           Released())
      .def("check", &Lease::check, Released(),
           "Before something is published: raises ConfigError if somebody has taken over.")
      .def("close", &Lease::close, Released(), "Gives it back.");
  module.def("holder_of", &holder_of, py::arg("folder"), Released(),
             "Who of this machine works in a folder, in words; empty: nobody.");
  module.def("recover_directory", &recover_directory, py::arg("target"), Released());
  module.def("settle_directory", &settle_directory, py::arg("target"), Released());
  module.def("remove_directory", &remove_directory, py::arg("dir"), Released());
  module.def("publish_file", &publish_bytes, py::arg("path"), py::arg("data"));
  module.def("safetensors_entries", &safetensors_entries, py::arg("data"), py::arg("origin"));
  module.def("model_description", &model_description, py::arg("folder"), py::arg("follow_symlinks") = false,
             Released());
  module.def("newest_checkpoint", &newest_checkpoint, py::arg("root"), Released());
}

}  // namespace tessera::bindings
