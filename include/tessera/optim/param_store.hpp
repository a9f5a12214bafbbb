#pragma once
/// ParamStore: gives parameters their memory, in a few flat buffers that one kernel call can walk over.

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "tessera/autograd/parameter.hpp"

namespace tessera {

struct ParamStoreOptions {
  DType compute = DType::f32;  ///< what kernels read: f32 (the main weights themselves) or bf16 (a copy)
  bool trainable = true;       ///< false: no gradient memory, parameters are not trained
};

/// Where a parameter lies in every flat buffer, in elements.
struct ParamSlot {
  Parameter* parameter = nullptr;
  std::int64_t offset = 0;
  std::int64_t numel = 0;
};

/// The gradient of everything since the last update: `scale` times the elements of `flat`.
struct FlatGradient {
  Tensor flat;
  double scale = 1.0;
};

/// Owns fp32 main weights, their compute copy (bf16 only) and fp32 gradients: flat buffers that share one
/// layout. Parameters lie in reverse order of registration (the order in which backward finishes them), each
/// start rounded up to kAlignment elements; the gaps are zero and stay zero.
///
/// Gradients of several calls: begin_call, backward passes, finish_call(factor), once or more; then an update
/// takes gradients(). The gradient buffer holds one call's gradient; a second buffer for their sum comes into
/// being with the first second call.
class ParamStore {
 public:
  static constexpr std::int64_t kAlignment = 64;

  /// Allocates, initialises every parameter by its Init (normal numbers keyed by (ctx.seed, name, element))
  /// and binds it. Errors: InvalidArgument for null or empty parameters, a name used twice, or a compute
  /// dtype other than f32 and bf16.
  ParamStore(const ExecCtx& ctx, std::vector<Parameter*> parameters, const ParamStoreOptions& options = {});
  ParamStore(const ParamStore&) = delete;
  ParamStore& operator=(const ParamStore&) = delete;

  /// In the order they were registered.
  const std::vector<Parameter*>& parameters() const { return parameters_; }
  /// In the order they lie in memory.
  const std::vector<ParamSlot>& slots() const { return slots_; }
  /// Elements of each flat buffer, gaps included.
  std::int64_t numel() const { return numel_; }
  DType compute_dtype() const { return options_.compute; }
  bool trainable() const { return options_.trainable; }

  /// fp32 [numel()].
  const Tensor& main_buffer() const { return main_; }
  /// bf16 [numel()], or undefined when kernels read the main weights.
  const Tensor& model_buffer() const { return model_; }
  /// fp32 [numel()] with the latest call's gradients, or undefined when not trainable.
  const Tensor& grad_buffer() const { return grad_; }

  /// The fp32 main weight, in the parameter's shape. Errors: InvalidArgument if the parameter is not in this
  /// store.
  Tensor main(const Parameter& parameter) const;
  /// The parameter's part of a buffer of numel() elements with this store's layout, in the parameter's shape.
  Tensor view(const Tensor& buffer, const Parameter& parameter) const;
  /// A new zeroed fp32 buffer with this store's layout (optimizer state).
  Tensor zeros() const;

  /// Rounds all main weights into what kernels read; needed after main weights were written by hand. No-op
  /// for f32.
  void refresh_model_copy();

  /// Opens the next call: its first contribution to each gradient overwrites. What a call that was never
  /// finished left is forgotten. A store without gradients is open already, so the first call needs no
  /// begin_call.
  void begin_call();
  /// Closes the call: zeroes the gradients nobody wrote and adds `factor` times the call's gradient to the
  /// sum. Errors: InvalidArgument if no call is open.
  void finish_call(double factor = 1.0);
  /// Calls finished since the last discard_gradients().
  int finished_calls() const { return finished_calls_; }
  /// The sum over finished calls. Errors: InvalidArgument if there is none.
  FlatGradient gradients() const;
  /// Forgets all gradients and opens the store for a first call. The memory stays.
  void discard_gradients();

 private:
  void lay_out();
  void initialise(const ParamSlot& slot);
  const ParamSlot& slot_of(const Parameter& parameter) const;
  Tensor view(const Tensor& buffer, const ParamSlot& slot) const;
  void clear_contributions();

  ExecCtx ctx_;
  ParamStoreOptions options_;
  std::vector<Parameter*> parameters_;
  std::vector<ParamSlot> slots_;
  std::unordered_map<const Parameter*, std::size_t> index_;
  std::int64_t numel_ = 0;
  Tensor main_, model_, grad_;
  Tensor sum_;                // of all calls but the first while that is the only one
  double bucket_factor_ = 1;  // of the only call, whose gradient is still in grad_
  bool summed_ = false;       // the gradient is in sum_, not in grad_
  bool open_ = true;
  int finished_calls_ = 0;
};

}  // namespace tessera
