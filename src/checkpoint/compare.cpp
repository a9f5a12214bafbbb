#include "tessera/checkpoint/compare.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>

namespace tessera {
namespace {

constexpr std::string_view kWeight = "param.";
constexpr std::int64_t kPiece = 1 << 14;  // values that are converted at a time

bool is_float(DType dtype) {
  return dtype == DType::f64 || dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16;
}

/// Values [first, first + out.size()) of a tensor's bytes as float64.
void values_of(DType dtype, std::span<const std::byte> bytes, std::int64_t first, std::span<double> out,
               const std::string& name) {
  const std::size_t width = size_of(dtype);
  const auto part = bytes.subspan(static_cast<std::size_t>(first) * width, out.size() * width);
  if (dtype == DType::f64) {
    std::memcpy(out.data(), part.data(), part.size());
    return;
  }
  TESSERA_ENSURE(CheckpointError, is_float(dtype), name, ": holds ", dtype,
                 "; float64, float32, bfloat16 and float16 are read here");
  std::array<float, kPiece> floats;
  const auto piece = std::span(floats).first(out.size());
  convert_floats(dtype, part, DType::f32, std::as_writable_bytes(piece));
  std::copy(piece.begin(), piece.end(), out.begin());
}

void add_value(double a, double b, const CompareOptions& options, TensorDifference& d) {
  if (a == b || (std::isnan(a) && std::isnan(b))) return;
  double abs = std::abs(a - b), rel = abs / std::max(std::abs(a), std::abs(b));
  if (!std::isfinite(abs)) abs = rel = std::numeric_limits<double>::infinity();
  d.max_abs = std::max(d.max_abs, abs);
  d.max_rel = std::max(d.max_rel, rel);
  if (!(abs <= options.atol + options.rtol * std::max(std::abs(a), std::abs(b))) || std::isinf(abs))
    ++d.different;
}

void compare_values(std::span<const std::byte> a, std::span<const std::byte> b, const CompareOptions& options,
                    TensorDifference& d) {
  if (d.a.dtype == d.b.dtype && std::ranges::equal(a, b)) return;
  if (!is_float(d.a.dtype) || !is_float(d.b.dtype)) {  // counters and the like: equal or not
    d.kind = TensorDifference::Kind::values;
    d.different = d.a.shape.numel();
    d.max_abs = d.max_rel = std::numeric_limits<double>::infinity();
    return;
  }
  std::vector<double> x(kPiece), y(kPiece);
  const std::int64_t count = d.a.shape.numel();
  for (std::int64_t first = 0; first < count; first += kPiece) {
    const auto size = static_cast<std::size_t>(std::min(kPiece, count - first));
    values_of(d.a.dtype, a, first, std::span(x).first(size), d.name);
    values_of(d.b.dtype, b, first, std::span(y).first(size), d.name);
    for (std::size_t i = 0; i < size; ++i) add_value(x[i], y[i], options, d);
  }
  if (d.different > 0) d.kind = TensorDifference::Kind::values;
}

std::map<std::string, TensorSpec> by_name(const WeightSource& source) {
  std::map<std::string, TensorSpec> out;
  for (TensorSpec& spec : source.tensors()) out.emplace(spec.name, spec);
  return out;
}

std::vector<std::byte> bytes_of(const WeightSource& source, const TensorSpec& spec) {
  std::vector<std::byte> bytes(spec.bytes());
  source.read(spec.name, bytes);
  return bytes;
}

}  // namespace

CheckpointWeights::CheckpointWeights(const std::filesystem::path& dir, bool with_state)
    : reader_(dir), with_state_(with_state) {}

std::vector<TensorSpec> CheckpointWeights::tensors() const {
  std::vector<TensorSpec> specs;
  for (const Manifest::Tensor& tensor : reader_.manifest().tensors) {
    const bool weight = tensor.name.starts_with(kWeight);
    if (weight || with_state_)
      specs.push_back(
          {weight ? tensor.name.substr(kWeight.size()) : tensor.name, tensor.dtype, tensor.shape});
  }
  return specs;
}

void CheckpointWeights::read(const std::string& name, std::span<std::byte> out) const {
  const std::string weight = std::string(kWeight) + name;
  reader_.read(reader_.find(weight) != nullptr ? weight : name, out);
}

bool CheckpointWeights::has_state() const {
  return std::ranges::any_of(reader_.manifest().tensors,
                             [](const auto& tensor) { return !tensor.name.starts_with(kWeight); });
}

void compare_weights(const WeightSource& a, const WeightSource& b, const CompareOptions& options,
                     const std::function<void(const TensorDifference&)>& tell) {
  using Kind = TensorDifference::Kind;
  const auto in_a = by_name(a), in_b = by_name(b);
  std::map<std::string, TensorSpec> all = in_a;
  all.insert(in_b.begin(), in_b.end());
  for (const auto& each : all) {
    const auto at_a = in_a.find(each.first), at_b = in_b.find(each.first);
    TensorDifference d{.name = each.first};
    if (at_a != in_a.end()) d.a = at_a->second;
    if (at_b != in_b.end()) d.b = at_b->second;
    if (at_a == in_a.end()) {
      d.kind = Kind::only_in_b;
    } else if (at_b == in_b.end()) {
      d.kind = Kind::only_in_a;
    } else if (d.a.shape != d.b.shape) {
      d.kind = Kind::shape;
    } else {
      compare_values(bytes_of(a, d.a), bytes_of(b, d.b), options, d);
    }
    tell(d);
  }
}

AveragedWeights::AveragedWeights(std::vector<std::shared_ptr<const WeightSource>> sources,
                                 std::span<const double> weights)
    : sources_(std::move(sources)), weights_(weights.begin(), weights.end()) {
  TESSERA_CHECK(!sources_.empty() && weights_.size() == sources_.size(), weights_.size(), " weights for ",
                sources_.size(), " checkpoints");
  const double sum = std::accumulate(weights_.begin(), weights_.end(), 0.0);
  TESSERA_CHECK(std::isfinite(sum) && sum != 0, "the weights sum to ", sum);
  for (double& weight : weights_) weight /= sum;
  specs_ = sources_.front()->tensors();
  for (std::size_t s = 0; s < sources_.size(); ++s) {
    const auto tensors = by_name(*sources_[s]);
    auto& dtypes = dtypes_.emplace_back();
    TESSERA_ENSURE(CheckpointError, tensors.size() == specs_.size(), "checkpoint ", s + 1, " has ",
                   tensors.size(), " tensors, and the first one ", specs_.size(),
                   ": they are of other models");
    for (const TensorSpec& spec : specs_) {
      const auto found = tensors.find(spec.name);
      TESSERA_ENSURE(CheckpointError, found != tensors.end(), "checkpoint ", s + 1, " has no ", spec.name,
                     ": it is of another model than the first one");
      TESSERA_ENSURE(CheckpointError, found->second.shape == spec.shape, spec.name, " is ",
                     found->second.shape, " in checkpoint ", s + 1, ", and ", spec.shape,
                     " in the first one: they are of other models");
      dtypes.push_back(found->second.dtype);
    }
  }
}

void AveragedWeights::read(const std::string& name, std::span<std::byte> out) const {
  const auto at = std::ranges::find(specs_, name, &TensorSpec::name);
  TESSERA_CHECK(at != specs_.end(), "there is no tensor ", name);
  const auto which = static_cast<std::size_t>(at - specs_.begin());
  const std::int64_t count = at->shape.numel();
  std::vector<double> sum(static_cast<std::size_t>(count), 0.0), values(kPiece);
  for (std::size_t s = 0; s < sources_.size(); ++s) {
    const DType dtype = dtypes_[s][which];
    const auto bytes = bytes_of(*sources_[s], {name, dtype, at->shape});
    for (std::int64_t first = 0; first < count; first += kPiece) {
      const auto piece = std::span(values).first(static_cast<std::size_t>(std::min(kPiece, count - first)));
      values_of(dtype, bytes, first, piece, name);
      for (std::size_t i = 0; i < piece.size(); ++i)
        sum[static_cast<std::size_t>(first) + i] += weights_[s] * piece[i];
    }
  }
  const std::size_t width = size_of(at->dtype);
  if (at->dtype == DType::f64) return static_cast<void>(std::memcpy(out.data(), sum.data(), out.size()));
  std::array<float, kPiece> floats;
  for (std::int64_t first = 0; first < count; first += kPiece) {
    const auto size = static_cast<std::size_t>(std::min(kPiece, count - first));
    for (std::size_t i = 0; i < size; ++i)
      floats[i] = static_cast<float>(sum[static_cast<std::size_t>(first) + i]);
    convert_floats(DType::f32, std::as_bytes(std::span(floats).first(size)), at->dtype,
                   out.subspan(static_cast<std::size_t>(first) * width, size * width));
  }
}

}  // namespace tessera
