/// The CUDA cross-entropy against the CPU's.

#include "kernels/api/cross_entropy.hpp"

#include <limits>

#include "tests/kernels/cuda/row_values.hpp"

namespace tessera::kernels {
namespace {

using test::DeviceStream;
using test::expect_close;
using test::random_values;
using test::Twin;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Case {
  std::int64_t rows, cols, pad = 0, vocab_begin = 0;
  std::size_t offset = 0;
  std::int64_t vocab = 0;  // 0: the columns are all of it
};

/// Some rows ignored, the others anywhere in the vocabulary.
std::vector<std::int32_t> labels_for(const Case& c) {
  const std::int64_t vocab = c.vocab != 0 ? c.vocab : c.cols;
  std::vector<std::int32_t> labels;
  for (std::int64_t r = 0; r < c.rows; ++r) {
    labels.push_back(r % 5 == 4 ? -100 : static_cast<std::int32_t>((r * 7919 + vocab - 1) % vocab));
  }
  return labels;
}

/// Forward, then backward from the CPU's log-sum-exp, on both sides.
template <typename T>
void compare(const Case& c, std::vector<T> logits, const std::vector<std::int32_t>& labels) {
  SCOPED_TRACE(::testing::Message() << c.rows << " rows of " << c.cols << " + " << c.pad << " from "
                                    << c.vocab_begin << ", offset " << c.offset << ", "
                                    << dtype_of<T>::value);
  const DeviceStream stream;
  Twin<T> x(stream, std::move(logits), c.offset);
  const Twin<std::int32_t> label(stream, labels);
  Twin<float> loss(stream, random_values<float>(c.rows, 2)), lse(stream, random_values<float>(c.rows, 3));
  const Twin<float> upstream(stream, random_values<float>(c.rows, 4));
  CrossEntropyForward forward{.rows = c.rows,
                              .cols = c.cols,
                              .ld = c.cols + c.pad,
                              .dtype = dtype_of<T>::value,
                              .logits = x.host.data(),
                              .labels = label.host.data(),
                              .loss = loss.host.data(),
                              .lse = lse.host.data(),
                              .vocab_begin = c.vocab_begin};
  cpu::cross_entropy_forward(forward, {});
  forward.logits = x.device.data();
  forward.labels = label.device.data();
  forward.loss = loss.device.data();
  forward.lse = lse.device.data();
  cuda::cross_entropy_forward(forward, stream.launch());
  expect_close(loss, 1e-6f, "loss");
  expect_close(lse, 1e-6f, "lse");

  tessera::cuda::copy(lse.device.data(), lse.host.data(), lse.host.size() * sizeof(float), stream.get());
  CrossEntropyBackward backward{.rows = c.rows,
                                .cols = c.cols,
                                .ld = c.cols + c.pad,
                                .dtype = dtype_of<T>::value,
                                .logits = x.host.data(),
                                .labels = label.host.data(),
                                .lse = lse.host.data(),
                                .upstream = upstream.host.data(),
                                .vocab_begin = c.vocab_begin};
  cpu::cross_entropy_backward(backward, {});
  backward.logits = x.device.data();
  backward.labels = label.device.data();
  backward.lse = lse.device.data();
  backward.upstream = upstream.device.data();
  cuda::cross_entropy_backward(backward, stream.launch());
  expect_close(x, 1e-6f, "gradient");
}

template <typename T>
void compare(const Case& c) {
  std::vector<T> logits = random_values<T>(c.rows * (c.cols + c.pad), 5, 8.0f);
  for (std::int64_t r = 0; r < c.rows; ++r) {
    for (std::int64_t j = c.cols; j < c.cols + c.pad; ++j) {  // must not count
      logits[static_cast<std::size_t>(r * (c.cols + c.pad) + j)] = static_cast<T>(6e4f);
    }
  }
  compare<T>(c, std::move(logits), labels_for(c));
}

TEST(CudaCrossEntropy, AgreesWithTheCpuAtAllWidths) {
  SKIP_WITHOUT_CUDA();
  for (const std::int64_t cols : {1, 3, 31, 33, 257, 768, 1600, 4096, 5120}) {
    for (const std::int64_t pad : {0, 5, 40}) {
      compare<float>({6, cols, pad});
      compare<bfloat16>({6, cols, pad});
      compare<float16>({6, cols, pad});
      if (HasFatalFailure()) return;
    }
  }
  compare<bfloat16>({3, 50257});
  compare<float>({2, 50257});
}

TEST(CudaCrossEntropy, AnyNumberOfRows) {
  SKIP_WITHOUT_CUDA();
  for (const std::int64_t rows : {0, 1, 7, 300}) compare<bfloat16>({rows, 211, 5});
}

TEST(CudaCrossEntropy, MisalignedRows) {
  SKIP_WITHOUT_CUDA();
  for (const std::size_t offset : {1, 2, 3, 7}) {
    for (const std::int64_t cols : {2, 7, 64, 2049, 9000}) {
      compare<bfloat16>({4, cols, 0, 0, offset});
      compare<float>({4, cols, 3, 0, offset});
      if (HasFatalFailure()) return;
    }
  }
}

TEST(CudaCrossEntropy, LabelsInOtherPartsOfTheVocabulary) {
  SKIP_WITHOUT_CUDA();
  for (const std::int64_t begin : {0, 100, 199}) {
    compare<float>({20, 101, 0, begin, 0, 300});
    compare<bfloat16>({20, 101, 3, begin, 0, 300});
  }
}

TEST(CudaCrossEntropy, ExtremeLogits) {
  SKIP_WITHOUT_CUDA();
  const std::int64_t cols = 2500;
  struct Row {
    float fill, peak;
  };
  for (const auto& [fill, peak] :
       {Row{0.0f, 1e30f}, Row{-1e30f, 1e30f}, Row{1e30f, 1e30f}, Row{-kInfinity, 3.0f}, Row{-1e30f, -1e30f},
        Row{-kInfinity, -1e30f}, Row{0.0f, -kInfinity}, Row{-kInfinity, -kInfinity}, Row{0.0f, kInfinity},
        Row{0.0f, NAN}, Row{NAN, NAN}}) {
    for (const std::int32_t at : {0, 1777, 2499}) {
      SCOPED_TRACE(::testing::Message() << fill << " and " << peak << " at " << at);
      std::vector<float> logits(static_cast<std::size_t>(cols), fill);
      logits[static_cast<std::size_t>(at)] = peak;
      compare<float>({1, cols}, logits, {at});
      compare<float>({1, cols}, logits, {1234});
      std::vector<bfloat16> short_logits(logits.begin(), logits.end());
      compare<bfloat16>({1, cols}, short_logits, {at});
      if (HasFatalFailure()) return;
    }
  }
}

TEST(CudaCrossEntropy, CombinesParts) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  for (const std::int64_t rows : {0, 1, 7, 300}) {
    for (const std::int64_t parts : {1, 2, 5}) {
      SCOPED_TRACE(::testing::Message() << rows << " rows, " << parts << " parts");
      auto values = random_values<float>(parts * 2 * rows, 7, 20.0f, 20.0f);
      auto labels = labels_for({rows, 1000});
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t part = 0; part < parts; ++part) {
          // One part has the label; every seventh row has none.
          float& loss = values[static_cast<std::size_t>(2 * part * rows + r)];
          if (r % parts != part || r % 7 == 6) loss = kInfinity;
          if (r == 3 && r % parts == part) loss = NAN;
          if (r == 5) values[static_cast<std::size_t>((2 * part + 1) * rows + r)] = -kInfinity;
        }
      }
      const Twin<float> partial(stream, values);
      const Twin<std::int32_t> label(stream, labels);
      Twin<float> loss(stream, random_values<float>(rows, 8)), lse(stream, random_values<float>(rows, 9));
      cpu::cross_entropy_combine(
          {rows, parts, partial.host.data(), label.host.data(), loss.host.data(), lse.host.data()}, {});
      cuda::cross_entropy_combine(
          {rows, parts, partial.device.data(), label.device.data(), loss.device.data(), lse.device.data()},
          stream.launch());
      expect_close(loss, 2e-7f, "loss");
      expect_close(lse, 2e-7f, "lse");
    }
  }
}

}  // namespace
}  // namespace tessera::kernels
