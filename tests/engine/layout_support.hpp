#pragma once
/// Trains one model on any layout and compares with the serial run: losses, every gradient of the first step,
/// every weight after the last.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tessera/base/config_file.hpp"
#include "tessera/engine/build.hpp"
#include "tests/support/device.hpp"

namespace tessera::test {

/// Whole tensors by parameter name.
using WholeTensors = std::map<std::string, std::vector<float>>;

struct TrainedRun {
  std::vector<double> losses, norms;
  WholeTensors gradients, weights;
};

/// Largest errors of a layout against the serial run: relative to each whole tensor's norm.
struct LayoutErrors {
  double loss = 0, gradient = 0, weight = 0;
  std::string worst_gradient, worst_weight;
};

/// Until the weights of the last update are here.
inline void await_weights(Engine& engine) {
  while (engine.params().weights().coming()) std::this_thread::yield();
}

/// The samples of one data rank, in the order Megatron's sampler gives them.
inline Batch data_part(const Batch& whole, int rank, int ranks, std::int64_t micro_batch) {
  Batch batch;
  batch.seq_length = whole.seq_length;
  batch.encoder_seq_length = whole.encoder_seq_length;
  for (std::int64_t first = rank * micro_batch; first < whole.batch; first += ranks * micro_batch) {
    const Batch piece = slice(whole, first, micro_batch);
    batch.batch += piece.batch;
    const auto append = [](auto& to, const auto& from) { to.insert(to.end(), from.begin(), from.end()); };
    append(batch.tokens, piece.tokens);
    append(batch.labels, piece.labels);
    append(batch.position_ids, piece.position_ids);
    append(batch.key_begin, piece.key_begin);
    append(batch.key_end, piece.key_end);
    append(batch.document_ids, piece.document_ids);
    append(batch.token_types, piece.token_types);
    append(batch.sample_labels, piece.sample_labels);
    append(batch.encoder_tokens, piece.encoder_tokens);
    append(batch.encoder_key_begin, piece.encoder_key_begin);
    append(batch.encoder_key_end, piece.encoder_key_end);
  }
  batch.sample0 = rank * micro_batch;
  batch.sample_block = micro_batch;
  batch.sample_stride = ranks * micro_batch;
  return batch;
}

/// What a rank holds of `tensor` (its own values), compared with the whole one.
inline double local_error(const Parameter& parameter, const Tensor& tensor, const std::vector<float>& whole) {
  const std::vector<float> own = tensor.to_floats();
  const Shape global = parameter.placement().global();
  const Shape from = global.contiguous_strides(), to = parameter.shape().contiguous_strides();
  double difference = 0, norm = 0;
  for (const float v : whole) norm += static_cast<double>(v) * v;
  for (const Placed& box : parameter.placement().boxes()) {
    for (std::int64_t i = 0; i < box.shape.numel(); ++i) {
      std::int64_t rest = i, source = 0, target = 0;
      for (int d = box.shape.rank() - 1; d >= 0; --d) {
        const std::int64_t at = rest % box.shape[d];
        rest /= box.shape[d];
        source += (box.global[d] + at) * from[d];
        target += (box.local[d] + at) * to[d];
      }
      const double e = static_cast<double>(own[static_cast<std::size_t>(target)]) -
                       whole[static_cast<std::size_t>(source)];
      difference += e * e;
    }
  }
  return std::sqrt(difference / std::max(norm, 1e-20));
}

inline WholeTensors whole_tensors(Engine& engine, bool gradients) {
  WholeTensors tensors;
  for (const Parameter* p : engine.params().parameters()) {
    tensors[p->name()] =
        (gradients ? engine.params().gradient().whole(*p) : engine.params().weights().whole(*p)).to_floats();
  }
  return tensors;
}

/// `steps` steps on the given global batches in one process.
inline TrainedRun train_serially(Config config, const std::vector<Batch>& batches) {
  config.parallel = {};
  config.parallel.zero_stage = 0;
  config.training.recompute = Recompute::none;
  const auto engine = build_engine(config);
  TrainedRun run;
  for (const Batch& batch : batches) {
    run.losses.push_back(engine->forward_backward(batch));
    if (run.gradients.empty()) run.gradients = whole_tensors(*engine, true);
    run.norms.push_back(engine->update().grad_norm);
  }
  run.weights = whole_tensors(*engine, false);
  return run;
}

using WorldMaker = std::function<std::shared_ptr<Communicator>(std::shared_ptr<Communicator>)>;

/// The same on the layout that config.parallel says; every rank compares what it holds. `wrap` may put
/// something in front of each rank's world communicator, `spoil` may change a rank's batch: deliberate
/// mistakes.
inline LayoutErrors compare_layout(const Config& config, int ranks, const std::vector<Batch>& batches,
                                   const TrainedRun& serial, const WorldMaker& wrap = nullptr,
                                   const std::function<void(Batch&)>& spoil = nullptr) {
  LayoutErrors errors;
  std::mutex mutex;
  const auto worst = [&](double& most, std::string* where, double error, const std::string& name) {
    if (!std::isfinite(error)) error = 1e30;
    if (error <= most) return;
    most = error;
    if (where) *where = name;
  };
  run_ranks(ranks, {.timeout_s = 120}, [&](std::shared_ptr<Communicator> world) {
    const auto engine = build_engine(config, true, wrap ? wrap(world) : world);
    const auto check = [&](bool gradients) {
      for (const Parameter* p : engine->params().parameters()) {
        const Tensor held =
            gradients ? engine->params().gradient().whole(*p) : engine->params().weights().whole(*p);
        const double error =
            local_error(*p, held, (gradients ? serial.gradients : serial.weights).at(p->name()));
        const std::lock_guard lock(mutex);
        if (gradients) {
          worst(errors.gradient, &errors.worst_gradient, error, p->name());
        } else {
          worst(errors.weight, &errors.worst_weight, error, p->name());
        }
      }
    };
    for (std::size_t step = 0; step < batches.size(); ++step) {
      Batch own = data_part(batches[step], engine->mesh().coordinates().dp, engine->mesh().shape().dp,
                            config.training.micro_batch_size);
      if (spoil) spoil(own);
      const double loss = engine->forward_backward(own);
      if (step == 0) check(true);
      const double norm = engine->update().grad_norm;
      const std::lock_guard lock(mutex);
      worst(errors.loss, nullptr, std::abs(loss - serial.losses[step]) / std::abs(serial.losses[step]), "");
      worst(errors.loss, nullptr, 0.1 * std::abs(norm - serial.norms[step]) / serial.norms[step], "");
    }
    check(false);
  });
  return errors;
}

}  // namespace tessera::test
