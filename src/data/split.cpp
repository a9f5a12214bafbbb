#include "tessera/data/split.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "tessera/base/error.hpp"

namespace tessera {
namespace {

/// numpy's pairwise summation: the rounding of the sum decides the last bit of every weight.
double numpy_sum(const double* x, std::size_t n) {
  if (n < 8) {
    double sum = -0.0;
    for (std::size_t i = 0; i < n; ++i) sum += x[i];
    return sum;
  }
  if (n <= 128) {
    double r[8];
    std::copy(x, x + 8, r);
    std::size_t i = 8;
    for (; i + 8 <= n; i += 8) {
      for (std::size_t k = 0; k < 8; ++k) r[k] += x[i + k];
    }
    double sum = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
    for (; i < n; ++i) sum += x[i];
    return sum;
  }
  const std::size_t half = n / 2 - (n / 2) % 8;
  return numpy_sum(x, half) + numpy_sum(x + half, n - half);
}

double parse_share(std::string_view text, const std::string& whole) {
  const auto first = text.find_first_not_of(" \t");
  const auto last = text.find_last_not_of(" \t");
  text = first == std::string_view::npos ? "" : text.substr(first, last - first + 1);
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  TESSERA_ENSURE(
      ConfigError,
      error == std::errc{} && end == text.data() + text.size() && std::isfinite(value) && value >= 0,
      "split \"", whole, "\": \"", text, "\" is not a share; write up to three numbers such as \"98,1,1\"");
  return value;
}

}  // namespace

const char* name_of(Split split) {
  return split == Split::train ? "train" : split == Split::valid ? "valid" : "test";
}

std::vector<double> normalized(std::span<const double> weights) {
  for (const double w : weights) TESSERA_CHECK(std::isfinite(w) && w >= 0, "weight ", w, " is not a share");
  const double sum = numpy_sum(weights.data(), weights.size());
  TESSERA_CHECK(sum > 0 && std::isfinite(sum), "the weights sum to ", sum);
  std::vector<double> out(weights.begin(), weights.end());
  for (double& w : out) w /= sum;
  return out;
}

SplitBounds parse_split(const std::string& text) {
  std::array<double, 3> shares{};
  std::size_t count = 0;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.find_first_of(",/", at), text.size());
    TESSERA_ENSURE(ConfigError, count < 3, "split \"", text, "\" has more than three shares");
    shares[count++] = parse_share(std::string_view(text).substr(at, end - at), text);
    at = end + 1;
  }
  TESSERA_ENSURE(ConfigError, *std::max_element(shares.begin(), shares.end()) > 0, "split \"", text,
                 "\" gives nothing to any split");
  const std::vector<double> width = normalized(shares);
  SplitBounds bounds;
  double begin = 0;
  for (std::size_t i = 0; i < 3; ++i) {
    const double end = begin + width[i];
    if (end > begin) bounds[i] = {begin, end};
    begin = end;
  }
  return bounds;
}

std::array<std::optional<ElementRange>, 3> split_ranges(const SplitBounds& bounds, std::int64_t elements) {
  TESSERA_CHECK(elements >= 0, elements, " elements");
  std::array<std::optional<ElementRange>, 3> ranges;
  const auto place = [elements](double fraction) {
    const double product = fraction * static_cast<double>(elements);
    return std::min(static_cast<std::int64_t>(std::nearbyint(product)), elements);
  };
  for (std::size_t i = 0; i < 3; ++i) {
    if (bounds[i]) ranges[i] = {place(bounds[i]->first), place(bounds[i]->second)};
  }
  return ranges;
}

}  // namespace tessera
