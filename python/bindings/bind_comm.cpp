#include <pybind11/stl.h>

#include "arrays.hpp"
#include "bindings.hpp"
#include "tessera/comm/communicator.hpp"
#include "tessera/launch/world.hpp"

namespace py = pybind11;

namespace tessera::bindings {
namespace {

using Released = py::call_guard<py::gil_scoped_release>;

ExecCtx host() { return ExecCtx::cpu(1); }

/// Bytes of all ranks; lengths may differ.
std::vector<std::string> gather(Communicator& group, const std::string& bytes) {
  const ExecCtx ctx = host();
  const auto own_length = static_cast<std::int64_t>(bytes.size());
  const Tensor length = Tensor::from(ctx, std::vector<std::int64_t>{own_length}, {1});
  const Tensor lengths = Tensor::empty(ctx, {group.size()}, DType::i64);
  group.all_gather(ctx, length, lengths).wait(ctx);
  const std::vector<std::int64_t> counts = lengths.to_vector<std::int64_t>();
  std::int64_t total = 0;
  for (const std::int64_t count : counts) total += count;
  const Tensor own = Tensor::wrap(const_cast<char*>(bytes.data()), {own_length}, DType::u8);
  const Tensor all = Tensor::empty(ctx, {total}, DType::u8);
  group.all_gather(ctx, own, all, counts).wait(ctx);
  std::vector<std::string> list;
  const char* next = static_cast<const char*>(all.raw());
  for (const std::int64_t count : counts) {
    list.emplace_back(next, static_cast<std::size_t>(count));
    next += count;
  }
  return list;
}

std::string broadcast_bytes(Communicator& group, const std::optional<std::string>& bytes, int root) {
  TESSERA_CHECK(group.rank() != root || bytes, "rank ", root, " must give the bytes to broadcast");
  const ExecCtx ctx = host();
  std::string result = group.rank() == root ? *bytes : "";
  const Tensor length =
      Tensor::from(ctx, std::vector<std::int64_t>{static_cast<std::int64_t>(result.size())}, {1});
  group.broadcast(ctx, length, root).wait(ctx);
  result.resize(static_cast<std::size_t>(length.to_vector<std::int64_t>()[0]));
  if (!result.empty()) {
    const auto size = static_cast<std::int64_t>(result.size());
    group.broadcast(ctx, Tensor::wrap(result.data(), {size}, DType::u8), root).wait(ctx);
  }
  return result;
}

ReduceOp reduction_of(const std::string& name) {
  TESSERA_CHECK(name == "sum" || name == "max", "a reduction is \"sum\" or \"max\", not \"", name, "\"");
  return name == "sum" ? ReduceOp::sum : ReduceOp::max;
}

}  // namespace

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
              all = gather(self, own);
            }
            py::list list;
            for (const std::string& each : all) list.append(py::bytes(each));
            return list;
          },
          py::arg("data"), "The bytes of all ranks.")
      .def(
          "broadcast_bytes",
          [](Communicator& self, const std::optional<py::bytes>& data, int root) {
            std::optional<std::string> own;
            if (data) own = std::string(*data);
            std::string result;
            {
              const py::gil_scoped_release release;
              result = broadcast_bytes(self, own, root);
            }
            return py::bytes(result);
          },
          py::arg("data"), py::arg("root") = 0, "The bytes of rank `root`.")
      .def(
          "split",
          [](Communicator& self, int color, int key, const std::string& name) {
            return self.split(color, key, name);
          },
          py::arg("color"), py::arg("key"), py::arg("name"), Released(),
          "Ranks of one color form a group, in the order of (key, rank); None for a color < 0.")
      .def("abort", &Communicator::abort, py::arg("reason"), Released(),
           "Ends every wait of all ranks with a CommunicationError that begins with `reason`.")
      .def("failure", &Communicator::failure, "Why nothing can be called any more; empty while all is well.");
  module.def(
      "connect_world", [](double timeout_s) { return connect_world(read_environment(), timeout_s); },
      py::arg("timeout_s") = 600.0, Released(),
      "The group of all processes of the job; this one alone if nobody launched it.");
}

}  // namespace tessera::bindings
