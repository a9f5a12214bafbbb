#include <pybind11/pybind11.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <memory>
#include <string>

#include "bindings.hpp"
#include "tessera/base/exit_codes.hpp"
#include "tessera/engine/watchdog.hpp"

namespace py = pybind11;

namespace tessera::bindings {
namespace {

std::atomic<bool> dump_requested = false;
static_assert(std::atomic<bool>::is_always_lock_free);
struct sigaction handler_before {};

/// Python's own handlers run between two lines of a script only, and a call that hangs never comes to the
/// next. So this one notes the wish, and passes the signal on to whoever had it.
void request_dump(int number, siginfo_t* info, void* context) {
  dump_requested = true;
  if ((handler_before.sa_flags & SA_SIGINFO) != 0) {
    handler_before.sa_sigaction(number, info, context);
  } else if (handler_before.sa_handler != SIG_DFL && handler_before.sa_handler != SIG_IGN) {
    handler_before.sa_handler(number);
  }
}

void dump_on_signal() {
  struct sigaction now {};
  sigaction(SIGUSR2, nullptr, &now);
  const bool ours = (now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == request_dump;
  if (ours || ((now.sa_flags & SA_SIGINFO) == 0 && now.sa_handler == SIG_IGN)) return;
  handler_before = now;
  struct sigaction action {};
  action.sa_sigaction = request_dump;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  sigaction(SIGUSR2, &action, nullptr);
}

/// A child that was forked has no thread to wait for, and its locks may be held by one it does not have.
class ProcessWatchdog {
 public:
  ProcessWatchdog(std::shared_ptr<Communicator> world, double timeout_s, const std::string& folder)
      : watchdog_(std::make_unique<Watchdog>(
            std::move(world),
            WatchdogOptions{
                .timeout_s = timeout_s,
                .folder = folder,
                // The interpreter may be what hangs: nothing of Python's is used.
                .on_hang = [](const std::string& text) { exit_code::end_hung("tessera: " + text); },
                .dump_asked = [] { return dump_requested.exchange(false); },
                .on_dump = [](const std::string& text) { exit_code::say("tessera: " + text); }})) {}
  ~ProcessWatchdog() { close(); }
  ProcessWatchdog(const ProcessWatchdog&) = delete;
  ProcessWatchdog& operator=(const ProcessWatchdog&) = delete;

  void set_folder(const std::string& folder) {
    if (watchdog_) watchdog_->set_folder(folder);
  }
  std::string dump(const std::string& why) {
    TESSERA_CHECK(watchdog_, "this watchdog was closed");
    return watchdog_->dump(why).string();
  }
  void close() {
    if (getpid() != pid_) static_cast<void>(watchdog_.release());
    watchdog_.reset();
  }

 private:
  pid_t pid_ = getpid();
  std::unique_ptr<Watchdog> watchdog_;
};

}  // namespace

void bind_flight(py::module_& module) {
  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<ProcessWatchdog>(module, "Watchdog",
                              "Ends this process when a call of the engine hangs, and dumps what it did.")
      .def(py::init<std::shared_ptr<Communicator>, double, const std::string&>(), py::arg("world"),
           py::arg("timeout_s"), py::arg("folder"))
      .def("set_folder", &ProcessWatchdog::set_folder, py::arg("folder"), Released(),
           "Where rank-N.json goes.")
      .def("dump", &ProcessWatchdog::dump, py::arg("why"), Released(),
           "Writes the last operations now; returns the file.")
      .def("close", &ProcessWatchdog::close, Released(), "Stops watching.");
  module.def("dump_on_signal", &dump_on_signal,
             "From now on SIGUSR2 asks the watchdog for a dump. A handler there was is called as well.");
}

}  // namespace tessera::bindings
