#include "engine/step_memory.hpp"

#include <bit>
#include <cstring>

namespace tessera {
namespace {

/// Parts begin at multiples of 256 bytes, as allocations do.
constexpr std::size_t kUnit = 64;

std::size_t rounded(std::size_t words) { return (words + kUnit - 1) / kUnit * kUnit; }

/// Step and gradients, then each micro-batch's tensors.
std::vector<std::int32_t> words_of(const StepMemory::Values& values) {
  std::vector<std::int32_t> words{std::bit_cast<std::int32_t>(values.step)};
  for (const float gradient : values.gradients) words.push_back(std::bit_cast<std::int32_t>(gradient));
  words.resize(rounded(words.size()));
  const auto add = [&](const MicroBatch& of) {
    of.each_tensor([&](const Tensor& tensor) {
      if (!tensor) return;
      const std::size_t begin = words.size();
      words.resize(begin + rounded(static_cast<std::size_t>(tensor.numel())));
      std::memcpy(words.data() + begin, tensor.data<std::int32_t>(), tensor.nbytes());
    });
  };
  for (const MicroBatch& micro_batch : values.micro_batches) {
    add(micro_batch);
    if (micro_batch.encoder) add(*micro_batch.encoder);
  }
  return words;
}

/// What of a call the kernels get by value.
std::vector<std::int64_t> work_of(const StepMemory::Values& values) {
  std::vector<std::int64_t> work{static_cast<std::int64_t>(values.gradients.size())};
  const auto add = [&](const MicroBatch& of) {
    work.insert(work.end(), {of.batch, of.seq_length, of.sample0});
    of.each_tensor([&](const Tensor& tensor) { work.push_back(tensor ? tensor.numel() : -1); });
  };
  for (const MicroBatch& micro_batch : values.micro_batches) {
    add(micro_batch);
    work.push_back(micro_batch.encoder ? 1 : 0);
    if (micro_batch.encoder) add(*micro_batch.encoder);
  }
  return work;
}

}  // namespace

StepMemory::StepMemory(const ExecCtx& ctx, const Values& values, std::int64_t marks)
    : terms_(static_cast<std::int64_t>(values.gradients.size())),
      told_(Tensor::empty(ctx, {terms_ + marks}, DType::i64)),
      micro_batches_(values.micro_batches),
      work_(work_of(values)) {
  const std::vector<std::int32_t> words = words_of(values);
  words_ = Tensor::from(ctx, words, {static_cast<std::int64_t>(words.size())});
  std::size_t begin = rounded(1 + values.gradients.size());
  const auto place = [&](MicroBatch& of) {
    of.labelled = {};  // the rows that count: their number changes, so here all are computed
    of.each_tensor([&](Tensor& tensor) {
      if (!tensor) return;
      const std::int64_t numel = tensor.numel();
      tensor = words_.narrow(0, static_cast<std::int64_t>(begin), numel).view(tensor.shape());
      begin += rounded(static_cast<std::size_t>(numel));
    });
  };
  for (MicroBatch& micro_batch : micro_batches_) {
    place(micro_batch);
    if (!micro_batch.encoder) continue;
    MicroBatch encoder = *micro_batch.encoder;
    place(encoder);
    micro_batch.encoder = std::make_shared<const MicroBatch>(std::move(encoder));
  }
}

bool StepMemory::fits(const Values& values) const { return work_of(values) == work_; }

void StepMemory::load(const Values& values) { words_.copy_from_host(words_of(values).data()); }

const std::uint32_t* StepMemory::step() const {
  return reinterpret_cast<const std::uint32_t*>(words_.data<std::int32_t>());
}

}  // namespace tessera
