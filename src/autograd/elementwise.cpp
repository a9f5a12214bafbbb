#include "tessera/ops/elementwise.hpp"

#include "tessera/autograd/functions.hpp"

namespace tessera {
namespace {

class ActivationFunction final : public Function {
 public:
  ActivationFunction(Tensor x, ops::ActivationKind kind) : x_(std::move(x)), kind_(kind) {}
  const char* name() const override { return "activation"; }
  Tensors backward_input(const ExecCtx& ctx, Tensors grads) override {
    return {ops::activation_backward(ctx, x_, grads[0], kind_)};
  }

 private:
  Tensor x_;
  ops::ActivationKind kind_;
};

Tensor scaled(const ExecCtx& ctx, const Tensor& x, float factor) {
  Tensor y = Tensor::empty(ctx, x.shape(), x.dtype());
  ops::axpby(ctx, factor, x, 0.0f, y);
  return y;
}

class ScaleFunction final : public Function {
 public:
  explicit ScaleFunction(float factor) : factor_(factor) {}
  const char* name() const override { return "scale"; }
  Tensors backward_input(const ExecCtx& ctx, Tensors grads) override {
    return {scaled(ctx, grads[0], factor_)};
  }

 private:
  float factor_;
};

class AddFunction final : public Function {
 public:
  AddFunction(DType a, DType b) : a_(a), b_(b) {}
  const char* name() const override { return "add"; }
  Tensors backward_input(const ExecCtx& ctx, Tensors grads) override {
    auto as = [&](DType dtype) {
      return grads[0].dtype() == dtype ? grads[0] : ops::cast(ctx, grads[0], dtype);
    };
    return {as(a_), as(b_)};
  }

 private:
  DType a_, b_;
};

class DropoutFunction final : public Function {
 public:
  explicit DropoutFunction(const DropoutSpec& spec) : spec_(spec) {}
  const char* name() const override { return "dropout"; }
  Tensors backward_input(const ExecCtx& ctx, Tensors grads) override {
    return {ops::dropout(ctx, grads[0], spec_)};
  }

 private:
  DropoutSpec spec_;
};

class CastFunction final : public Function {
 public:
  explicit CastFunction(DType from) : from_(from) {}
  const char* name() const override { return "cast"; }
  Tensors backward_input(const ExecCtx& ctx, Tensors grads) override {
    return {ops::cast(ctx, grads[0], from_)};
  }

 private:
  DType from_;
};

}  // namespace

Var activation(const ExecCtx& ctx, const Var& x, ops::ActivationKind kind) {
  return record({x}, ops::activation(ctx, x.value(), kind),
                [&] { return std::make_unique<ActivationFunction>(x.value(), kind); });
}

Var scale(const ExecCtx& ctx, const Var& x, float factor) {
  return record({x}, scaled(ctx, x.value(), factor), [&] { return std::make_unique<ScaleFunction>(factor); });
}

Var add(const ExecCtx& ctx, const Var& a, const Var& b) {
  return record({a, b}, ops::add(ctx, a.value(), b.value(), a.value().dtype()),
                [&] { return std::make_unique<AddFunction>(a.value().dtype(), b.value().dtype()); });
}

Var dropout(const ExecCtx& ctx, const Var& x, const DropoutSpec& spec) {
  if (!spec.active()) return x;
  return record({x}, ops::dropout(ctx, x.value(), spec),
                [&] { return std::make_unique<DropoutFunction>(spec); });
}

Var cast(const ExecCtx& ctx, const Var& x, DType dtype) {
  const DType from = x.value().dtype();
  if (from == dtype) return x;
  Var y = record({x}, ops::cast(ctx, x.value(), dtype), [&] { return std::make_unique<CastFunction>(from); });
  if (x.recipe())
    y.set_recipe([recipe = x.recipe(), dtype](const ExecCtx& c) { return ops::cast(c, recipe(c), dtype); });
  return y;
}

}  // namespace tessera
