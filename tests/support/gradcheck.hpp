#pragma once
/// Gradients of recorded functions against central differences of their forward.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tessera/autograd/tape.hpp"
#include "tessera/ops/elementwise.hpp"

namespace tessera::test {

/// Reproducible values in [-scale, scale).
inline std::vector<float> random_floats(std::int64_t count, unsigned seed, float scale = 1.0f) {
  std::mt19937 generator(seed);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& v : values) v = scale * (static_cast<float>(generator() >> 8) * 0x1p-23f - 1.0f);
  return values;
}

inline Tensor random_tensor(const ExecCtx& ctx, const Shape& shape, unsigned seed, float scale = 1.0f) {
  return Tensor::from(ctx, random_floats(shape.numel(), seed, scale), shape);
}

/// A parameter with memory of its own.
inline std::unique_ptr<Parameter> make_parameter(const ExecCtx& ctx, const std::string& name,
                                                 const Shape& shape, unsigned seed, bool trained = true) {
  auto parameter = std::make_unique<Parameter>(name, shape, Init::zeros());
  parameter->bind(random_tensor(ctx, shape, seed), trained ? random_tensor(ctx, shape, seed + 1) : Tensor());
  return parameter;
}

inline double norm_of(const std::vector<double>& values) {
  double sum = 0.0;
  for (const double v : values) sum += v * v;
  return std::sqrt(sum);
}

/// ||a - b|| / ||b||, with the norm of b taken as at least `floor`.
template <typename A, typename B>
double distance(const std::vector<A>& a, const std::vector<B>& b, double floor = 1e-30) {
  EXPECT_EQ(a.size(), b.size());
  std::vector<double> difference, reference;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    difference.push_back(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    reference.push_back(static_cast<double>(b[i]));
  }
  return norm_of(difference) / std::max(norm_of(reference), floor);
}

struct GradCase {
  std::vector<Tensor> inputs;  ///< fp32, require a gradient
  std::vector<Parameter*> parameters;
  /// The function: from the inputs, as Vars on one tape, to one fp32 Var.
  std::function<Var(const ExecCtx&, std::vector<Var>)> build;
};

struct GradError {
  std::string name;
  double relative = 0;  ///< norm of the difference over the norm of the gradient
};

namespace detail {

/// The scalar whose gradient is taken: <upstream, build(inputs)>, summed in fp64.
inline double scalar(const ExecCtx& ctx, const GradCase& c, const std::vector<float>& upstream) {
  const Var result = c.build(ctx, {c.inputs.begin(), c.inputs.end()});
  const std::vector<float> y = ops::contiguous(ctx, result.value()).to_floats();
  double sum = 0.0;
  for (std::size_t i = 0; i < y.size(); ++i) sum += static_cast<double>(y[i]) * upstream[i];
  return sum;
}

inline std::vector<double> central_differences(const ExecCtx& ctx, const GradCase& c, const Tensor& at,
                                               const std::vector<float>& upstream, float eps) {
  std::vector<double> gradient;
  std::vector<float> x = at.to_vector<float>();
  const auto with = [&](std::size_t i, float value) {
    x[i] = value;
    at.copy_from_host(x.data());
    return scalar(ctx, c, upstream);
  };
  for (std::size_t i = 0; i < x.size(); ++i) {
    const float kept = x[i];
    const float above = kept + eps, below = kept - eps;
    const double high = with(i, above), low = with(i, below);
    x[i] = kept;
    at.copy_from_host(x.data());
    gradient.push_back((high - low) / (static_cast<double>(above) - static_cast<double>(below)));
  }
  return gradient;
}

}  // namespace detail

/// How far the recorded gradient of every input and parameter is from central differences, for a random
/// upstream.
inline std::vector<GradError> gradient_errors(const ExecCtx& ctx, const GradCase& c, float eps = 1e-2f) {
  Tape tape;
  std::vector<Var> inputs;
  for (const Tensor& input : c.inputs) inputs.push_back(tape.input(input, true));
  for (Parameter* parameter : c.parameters) parameter->clear_grad();
  const Var y = c.build(ctx, inputs);
  const std::vector<float> upstream = random_floats(y.value().numel(), 4242);
  tape.backward(ctx, y, Tensor::from(ctx, upstream, y.value().shape()));

  std::vector<GradError> errors;
  const auto compare = [&](const std::string& name, const Tensor& at, const Tensor& gradient) {
    const std::vector<float> analytic =
        gradient ? gradient.to_floats() : std::vector<float>(static_cast<std::size_t>(at.numel()), 0.0f);
    errors.push_back(
        {name, distance(analytic, detail::central_differences(ctx, c, at, upstream, eps), 1e-2)});
  };
  for (std::size_t i = 0; i < inputs.size(); ++i)
    compare("input " + std::to_string(i), c.inputs[i], tape.grad(inputs[i]));
  for (Parameter* parameter : c.parameters) {
    compare(parameter->name(), parameter->value(), parameter->has_grad() ? parameter->grad() : Tensor());
  }
  return errors;
}

inline void expect_gradients(const ExecCtx& ctx, const GradCase& c, double tolerance = 2e-3,
                             float eps = 1e-2f) {
  for (const GradError& error : gradient_errors(ctx, c, eps)) {
    EXPECT_LE(error.relative, tolerance) << "gradient of " << error.name;
  }
}

}  // namespace tessera::test
