#include <pybind11/stl.h>

#include "arrays.hpp"
#include "bindings.hpp"
#include "mesh.hpp"
#include "tessera/comm/bytes.hpp"
#include "tessera/comm/heartbeat.hpp"
#include "tessera/comm/meeting.hpp"
#include "tessera/launch/progress.hpp"
#include "tessera/launch/world.hpp"

namespace py = pybind11;

namespace tessera::bindings {
namespace {

using Released = py::call_guard<py::gil_scoped_release>;

ExecCtx host() { return ExecCtx::cpu(1); }

/// Lets Python's signal handlers have their turn while the main thread waits in C++: Ctrl-C ends the wait.
/// Other threads, which run none, must not ask for the interpreter's lock: it may be gone.
WhileWaiting check_signals() {
  const auto main =
      py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>();
  return [main] {
    if (PyThread_get_thread_ident() != main) return;
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  };
}

ReduceOp reduction_of(const std::string& name) {
  TESSERA_CHECK(name == "sum" || name == "max", "a reduction is \"sum\" or \"max\", not \"", name, "\"");
  return name == "sum" ? ReduceOp::sum : ReduceOp::max;
}

}  // namespace

std::function<std::string()> place_of_call(const py::object& place) {
  if (place.is_none()) return nullptr;
  return [&place] {
    const py::gil_scoped_acquire gil;
    return place().cast<std::string>();
  };
}

void bind_comm(py::module_& module) {
  py::class_<Communicator, std::shared_ptr<Communicator>>(
      module, "Communicator", "A group of ranks. Every rank calls the same members in the same order.")
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def_property_readonly("name", &Communicator::name)
      .def(
          "barrier", [](Communicator& self) { self.barrier(host()); }, Released())
      .def(
          "all_reduce",
          [](Communicator& self, const py::array& array, const std::string& op) {
            const Tensor tensor = tensor_of(array);
            const ReduceOp how = reduction_of(op);
            const py::gil_scoped_release release;
            self.all_reduce(host(), tensor, how).wait(host());
          },
          py::arg("array"), py::arg("op") = "sum", "In place, over all ranks.")
      .def(
          "all_gather",
          [](Communicator& self, const py::array& array) {
            const Tensor own = tensor_of(array);
            std::vector<std::int64_t> dims{self.size()};
            for (const std::int64_t n : own.shape().dims()) dims.push_back(n);
            Tensor all;
            {
              const py::gil_scoped_release release;
              all = Tensor::empty(host(), Shape(std::span<const std::int64_t>(dims)), own.dtype());
              self.all_gather(host(), own, all).wait(host());
            }
            return array_of(all);
          },
          py::arg("array"), "[size, *shape]: the arrays of all ranks, which have one shape.")
      .def(
          "broadcast",
          [](Communicator& self, const py::array& array, int root) {
            const Tensor tensor = tensor_of(array);
            const py::gil_scoped_release release;
            self.broadcast(host(), tensor, root).wait(host());
          },
          py::arg("array"), py::arg("root") = 0, "In place, from rank `root`.")
      .def(
          "all_gather_bytes",
          [](Communicator& self, const py::bytes& data) {
            std::string own = data;
            std::vector<std::string> all;
            {
              const py::gil_scoped_release release;
              all = all_gather_bytes(self, own);
            }
            py::list list;
            for (const std::string& each : all) list.append(py::bytes(each));
            return list;
          },
          py::arg("data"), "The bytes of all ranks.")
      .def(
          "broadcast_bytes",
          [](Communicator& self, const std::optional<py::bytes>& data, int root) {
            TESSERA_CHECK(self.rank() != root || data, "rank ", root, " must give the bytes to broadcast");
            std::string result = data.value_or(py::bytes());
            {
              const py::gil_scoped_release release;
              result = broadcast_bytes(self, result, root);
            }
            return py::bytes(result);
          },
          py::arg("data"), py::arg("root") = 0, "The bytes of rank `root`.")
      .def(
          "meet",
          [](Communicator& self, const std::string& call, const std::vector<std::int64_t>& values,
             const py::object& place) {
            MeetingValues own{};
            TESSERA_CHECK(values.size() <= own.size(), values.size(), " values for a meeting of ",
                          own.size());
            std::copy(values.begin(), values.end(), own.begin());
            const std::function<std::string()> where = place_of_call(place);
            const py::gil_scoped_release release;
            return meet(self, call, own, where);
          },
          py::arg("call"), py::arg("values") = std::vector<std::int64_t>(), py::arg("place") = py::none(),
          "What every rank gave, 7 numbers each, once all are about to do the same.")
      .def(
          "split",
          [](Communicator& self, int color, int key, const std::string& name) {
            return self.split(color, key, name);
          },
          py::arg("color"), py::arg("key"), py::arg("name"), Released(),
          "Ranks of one color form a group, in the order of (key, rank); None for a color < 0.")
      .def("abort", &Communicator::abort, py::arg("reason"), Released(),
           "Ends every wait of all ranks with a CommunicationError that begins with `reason`.")
      .def("heartbeat", &heartbeat, Released(),
           "This rank gets on with long work: every wait for it counts its deadline from now.")
      .def("leave", &Communicator::leave, Released(),
           "Parts from the other processes: what was called is finished, later calls on any group of this "
           "process "
           "fail.");
  py::class_<ScriptMesh, std::shared_ptr<ScriptMesh>>(
      module, "ProcessMesh", "The ranks as a grid in Megatron's order: tp varies fastest, then cp, dp, pp.")
      .def(py::init([](const std::shared_ptr<Communicator>& world, int tp, int dp, int pp, int cp, int ep) {
             return std::make_shared<ScriptMesh>(world,
                                                 MeshShape{.tp = tp, .cp = cp, .ep = ep, .dp = dp, .pp = pp});
           }),
           py::arg("world"), py::kw_only(), py::arg("tp"), py::arg("dp"), py::arg("pp"), py::arg("cp") = 1,
           py::arg("ep") = 1, Released(), "Collective over `world`.")
      .def_property_readonly("tp", [](const ScriptMesh& self) { return self.shape().tp; })
      .def_property_readonly("cp", [](const ScriptMesh& self) { return self.shape().cp; })
      .def_property_readonly("dp", [](const ScriptMesh& self) { return self.shape().dp; })
      .def_property_readonly("pp", [](const ScriptMesh& self) { return self.shape().pp; })
      .def_property_readonly(
          "world",
          [](const std::shared_ptr<ScriptMesh>& self) {
            return std::shared_ptr<Communicator>(self, &self->world());
          },
          "All ranks.")
      .def_readonly("data", &ScriptMesh::data, "Those that differ from this one in dp alone.")
      .def_property_readonly(
          "coordinates",
          [](const ScriptMesh& self) {
            const MeshCoordinates& at = self.coordinates();
            return py::dict(py::arg("tp") = at.tp, py::arg("cp") = at.cp, py::arg("pp") = at.pp,
                            py::arg("dp") = at.dp);
          },
          "The place of this rank.")
      .def("__repr__", [](const ScriptMesh& self) {
        const auto& [shape, at] = std::pair(self.shape(), self.coordinates());
        return detail::concat("Mesh(tp=", shape.tp, ", cp=", shape.cp, ", pp=", shape.pp, ", dp=", shape.dp,
                              ", this rank at tp ", at.tp, ", cp ", at.cp, ", pp ", at.pp, ", dp ", at.dp,
                              ")");
      });
  module.def(
      "local_communicators",
      [](int size, double timeout_s) {
        return make_local_communicators(size, "world", {.timeout_s = timeout_s});
      },
      py::arg("size"), py::arg("timeout_s"), "Ranks that are threads of this process, one each.");
  module.def(
      "connect_world",
      [](double timeout_s) {
        const WhileWaiting while_waiting = check_signals();
        const py::gil_scoped_release release;
        return connect_world(read_environment(), timeout_s, while_waiting);
      },
      py::arg("timeout_s") = 600.0,
      "The group of all processes of the job; this one alone if nobody launched it.");
  py::class_<ProgressReporter>(module, "ProgressReporter",
                               "Tells the launcher, if there is one, how far this process has come.")
      .def(py::init([] { return ProgressReporter(read_environment()); }))
      .def("step", &ProgressReporter::step, py::arg("step"), "Step `step`, counted from 1, was made.")
      .def("saved", &ProgressReporter::saved, py::arg("step"), py::arg("seconds"),
           "A checkpoint of that step is whole; writing it took so many seconds.");
  module.def(
      "warning_of_open_world", [] { return warning_of_open_world(read_environment()); },
      "What a person should know before connect_world() meets over a network without a secret; else empty.");
}

}  // namespace tessera::bindings
