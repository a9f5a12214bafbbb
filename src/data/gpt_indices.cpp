#include "tessera/data/gpt_indices.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

#include "tessera/data/numpy_random.hpp"

namespace tessera {
namespace {

constexpr std::int64_t kInt32Max = std::numeric_limits<std::int32_t>::max();
/// A request for more rows than this is a mistake, not a training run; it also keeps every product below
/// 2^63.
constexpr std::int64_t kMostEntries = std::int64_t{1} << 36;

template <typename T>
std::vector<T> sample_rows(LengthsView lengths, const std::int32_t* documents, std::int64_t count,
                           std::int64_t seq_length, std::int64_t samples,
                           const std::function<void()>& on_progress) {
  constexpr std::int64_t kDocumentsPerReport = 1 << 20;
  std::vector<T> rows(static_cast<std::size_t>(2 * (samples + 1)), T{0});
  T* row = rows.data() + 2;  // row 0 is (0, 0), even when the first document is empty
  T* const end = rows.data() + rows.size();
  std::int64_t target = seq_length;  // offset of the next row from the start of the current document
  for (std::int64_t d = 0; d < count && row != end; ++d) {
    if (on_progress && d % kDocumentsPerReport == 0) on_progress();
    const std::int64_t length = lengths[documents[d]];
    for (; target < length && row != end; target += seq_length, row += 2) {
      row[0] = static_cast<T>(d);
      row[1] = static_cast<T>(target);
    }
    target -= length;
  }
  if (row != end) {  // the last sample is a partial one: it ends with the last token
    row[0] = static_cast<T>(count - 1);
    row[1] = static_cast<T>(lengths[documents[count - 1]] - 1);
  }
  return rows;
}

template <typename T>
IntArray shuffled_range(std::int64_t first, std::int64_t total, NumpyRandom& random) {
  std::vector<T> order(static_cast<std::size_t>(total));
  std::iota(order.begin(), order.end(), T{0});
  random.shuffle(std::span(order).first(static_cast<std::size_t>(first)));
  random.shuffle(std::span(order).subspan(static_cast<std::size_t>(first)));
  return IntArray(std::move(order));
}

IntArray document_order(const GptIndexRequest& request, const GptIndexPlan& plan, NumpyRandom& random) {
  const std::int64_t count = request.end - request.begin;
  std::vector<std::int32_t> order(static_cast<std::size_t>(count * plan.epochs));
  for (std::int64_t i = 0; i < plan.epochs * count; ++i) {
    order[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(request.begin + i % count);
  }
  const auto first = static_cast<std::size_t>(count * (plan.epochs - (plan.separate_last_epoch ? 1 : 0)));
  random.shuffle(std::span(order).first(first));
  random.shuffle(std::span(order).subspan(first));
  return IntArray(std::move(order));
}

}  // namespace

std::int64_t count_tokens(LengthsView lengths, std::int64_t begin, std::int64_t end) {
  TESSERA_CHECK(begin >= 0 && begin <= end && end <= lengths.size(), "sequences [", begin, ", ", end, ") of ",
                lengths.size());
  std::int64_t tokens = 0;
  for (std::int64_t i = begin; i < end; ++i) tokens += lengths[i];
  return tokens;
}

GptIndexPlan plan_gpt_indices(std::int64_t tokens_per_epoch, const GptIndexRequest& request) {
  const std::int64_t s = request.seq_length;
  TESSERA_CHECK(s > 0 && s < kInt32Max, "seq_length = ", s);
  TESSERA_CHECK(request.end <= kInt32Max, "sequence numbers up to ", request.end,
                " exceed Megatron's int32 index");
  const std::int64_t wanted = request.num_samples.value_or(0);
  TESSERA_CHECK(wanted >= 0 && wanted <= kMostEntries / s, wanted, " samples of ", s, " tokens");
  TESSERA_ENSURE(DataError, tokens_per_epoch > 0 || wanted == 0, "sequences [", request.begin, ", ",
                 request.end, ") hold no token, but ", wanted,
                 " samples are asked for. Give the split a larger share or more data");
  GptIndexPlan plan;
  plan.tokens_per_epoch = tokens_per_epoch;
  if (tokens_per_epoch == 0) return plan;
  const std::int64_t needed = wanted * s + 1;
  if (request.num_samples)
    plan.epochs = std::max<std::int64_t>(1, (needed + tokens_per_epoch - 1) / tokens_per_epoch);
  TESSERA_CHECK(plan.epochs <= kInt32Max &&
                    plan.epochs <= kMostEntries / std::max<std::int64_t>(1, request.end - request.begin),
                wanted, " samples need ", plan.epochs, " epochs of ", request.end - request.begin,
                " documents; use more data");
  const std::int64_t targets = plan.epochs * tokens_per_epoch - 1;
  plan.samples = request.keep_partial ? (targets + s - 1) / s : targets / s;
  plan.first_shuffle = plan.samples;
  if (plan.epochs > 1) {
    const std::int64_t before_last = ((plan.epochs - 1) * tokens_per_epoch - 1) / s;
    const std::int64_t per_epoch = (tokens_per_epoch - 1) / s;
    const auto threshold = static_cast<std::int64_t>(0.80 * static_cast<double>(per_epoch));
    plan.separate_last_epoch = wanted - before_last < threshold;
    if (plan.separate_last_epoch) plan.first_shuffle = before_last;
  }
  return plan;
}

IntArray build_sample_index(LengthsView lengths, const IntArray& document_index, std::int64_t seq_length,
                            std::int64_t samples, const std::function<void()>& on_progress) {
  TESSERA_CHECK(document_index.dtype() == DType::i32, "the document index is int32");
  const auto* documents = reinterpret_cast<const std::int32_t*>(document_index.bytes().data());
  const std::int64_t count = document_index.size();
  // Offsets are below a sequence length, an int32; only the position can need more.
  if (count <= kInt32Max)
    return IntArray(sample_rows<std::int32_t>(lengths, documents, count, seq_length, samples, on_progress));
  return IntArray(sample_rows<std::int64_t>(lengths, documents, count, seq_length, samples, on_progress));
}

GptIndices build_gpt_indices(LengthsView lengths, const GptIndexRequest& request) {
  const GptIndexPlan plan = plan_gpt_indices(count_tokens(lengths, request.begin, request.end), request);
  if (plan.tokens_per_epoch == 0) return {};
  NumpyRandom random(request.seed);
  random.on_progress(request.on_progress);
  GptIndices indices;
  indices.document_index = document_order(request, plan, random);
  indices.sample_index = build_sample_index(lengths, indices.document_index, request.seq_length, plan.samples,
                                            request.on_progress);
  const bool wide = plan.samples >= std::int64_t{std::numeric_limits<std::uint32_t>::max()} - 1;
  indices.shuffle_index = wide ? shuffled_range<std::int64_t>(plan.first_shuffle, plan.samples, random)
                               : shuffled_range<std::uint32_t>(plan.first_shuffle, plan.samples, random);
  return indices;
}

}  // namespace tessera
