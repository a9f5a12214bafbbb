#pragma once
#include <functional>
#include <string>
#include <vector>

#include "tessera/comm/communicator.hpp"

namespace tessera {

/// Calls fn on rank 0 only; its result, or its error, reaches every rank. Collective.
std::string on_first_rank(const ExecCtx& ctx, Communicator& group, const std::function<std::string()>& fn);

/// Calls fn on every rank. If it fails anywhere, those ranks throw their own error, and the others a
/// CommunicationError with that of the first of them. Collective.
void on_every_rank(const ExecCtx& ctx, Communicator& group, const std::function<void()>& fn);

/// The sum of a number, or of each of several, that each rank has; at once for a group of one. Collective.
double sum_over_ranks(const ExecCtx& ctx, Communicator& group, double value);
std::vector<double> sum_over_ranks(const ExecCtx& ctx, Communicator& group, std::vector<double> values);

/// For work that others wait for: what it calls after each of its parts. `group` outlives it.
std::function<void()> heartbeat_of(Communicator& group);

}  // namespace tessera
