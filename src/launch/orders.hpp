#pragma once
/// What a launcher says to those that it starts on other machines, over their input: the settings of the job,
/// then signals, a byte for each. The end of the input means that nobody is there any more.

#include <string>
#include <thread>

#include "tessera/launch/settings.hpp"

namespace tessera::launching {

/// The settings, with their environment; warnings stay here.
std::string encode_orders(const LaunchSettings& settings);

/// Waits for them. Errors: CommunicationError if the input ends before, or says what is no setting.
LaunchSettings read_orders(int input);

/// While it lives, every byte that comes is a signal to this process, and the end of the input is SIGTERM:
/// workers save and end.
class OrderedSignals {
 public:
  /// Errors: IoError.
  explicit OrderedSignals(int input);
  ~OrderedSignals();
  OrderedSignals(const OrderedSignals&) = delete;
  OrderedSignals& operator=(const OrderedSignals&) = delete;

 private:
  void run(int input);

  int stop_ = -1;
  std::thread thread_;
};

}  // namespace tessera::launching
