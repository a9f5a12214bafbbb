#pragma once
/// What ranks tell each other about their batches before a step: one small message from each.

#include <exception>
#include <functional>
#include <span>
#include <string>

#include "tessera/base/update_state.hpp"
#include "tessera/comm/mesh.hpp"
#include "tessera/data/batch.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera {

struct Config;

/// The call that a batch is for.
struct BatchCall {
  std::string name;                              ///< as in meet()
  std::int64_t step = 0;                         ///< updates so far: ranks must have made equally many
  std::function<std::string()> place = nullptr;  ///< as in meet()
  std::uint64_t frozen_hash = 0;  ///< of what is frozen, which must be the same on all ranks ...
  std::function<std::string()> frozen = nullptr;  ///< ... and its names, a line each
  std::exception_ptr failure = nullptr;           ///< why this rank cannot use its batch
  /// What ranks of the same data rank get that came without a batch; null: there are none such.
  std::function<std::string()> give = nullptr;
};

/// Collective over mesh.world(), one meeting. Fills in what all data ranks have together, and the batch's
/// place among them where global_batch is kUnknown. Errors, on every rank: InvalidArgument for ranks that
/// called something else; DataError where ranks of one data rank hold different batches, naming ranks, step
/// and what differs; InvalidArgument where ranks do not train the same parameters; call.failure where there
/// is one, CommunicationError with its text on the other ranks.
void agree(const ProcessMesh& mesh, Batch& batch, const BatchCall& call);

/// The same for a rank without a batch: returns what a peer of its data rank gives, and in `batch` its place.
/// Errors: also DataError if none of them has a batch.
std::string take_batch(const ProcessMesh& mesh, Batch& batch, const BatchCall& call);

/// Collective over `world`: refuses ranks whose configurations differ in anything but what is a process's or
/// machine's own (device.index, device.threads, device.gemm_cache, parallel.timeout_s, logging.dir,
/// checkpoint.dir, data.cache_dir). Errors, on every rank: ConfigError naming keys, values and ranks.
void agree_on_config(const Config& config, Communicator& world);

/// The same for the rates of an update, one for each group, and the factors of the calls that it adds up.
/// Errors: InvalidArgument.
void agree_on_update(std::span<const UpdateRates> rates, std::span<const double> factors,
                     Communicator& world);

/// Collective over mesh.world(), before any rank runs the backward passes of forward() number `forward`.
/// `upstream`: the gradient that the caller gave; on the host it must be that of all tensor ranks with this
/// data rank's head, up to rounding. `failure`: why this rank cannot run. Errors, on every rank:
/// InvalidArgument for another forward's backward; DataError where tensor ranks come with different
/// gradients; `failure` where there is one, CommunicationError with its text on the other ranks.
void agree_on_backward(const ProcessMesh& mesh, std::int64_t forward, const Tensor& upstream,
                       const std::exception_ptr& failure);

}  // namespace tessera
