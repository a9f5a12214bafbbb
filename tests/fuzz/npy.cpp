/// The index cache of GPT samples: description, then the three .npy files. What is accepted holds no number
/// that leads out of the data.

#include "data/npy.hpp"

#include "data/file.hpp"
#include "data/index_check.hpp"
#include "fuzz.hpp"

using namespace tessera;

namespace {

/// The first eight bytes say what is expected.
struct Expected {
  int which;
  bool wide;
  std::int64_t size;
  GptIndexRequest request;
};

npy::Layout layout_of(const Expected& e) {
  if (e.which == 0) return {DType::i32, {e.size}};
  if (e.which == 1) return {e.wide ? DType::i64 : DType::i32, {e.size, 2}};
  return {e.wide ? DType::i64 : DType::u32, {e.size}};
}

void check_rows(const IntArray& array, const Expected& e) {
  for (std::int64_t i = 0; i < e.size; ++i) {
    fuzz::require(array[2 * i] >= 0 && array[2 * i] < e.request.end && array[2 * i + 1] >= 0,
                  "a row leads out of the data");
    if (i > 0) fuzz::require(array[2 * i] >= array[2 * i - 2], "rows do not rise");
  }
}

void load(const std::uint8_t* data, std::size_t size, const Expected& e) {
  const IntArray array =
      npy::load(std::make_shared<files::InputFile>("input", fuzz::bytes_of(data, size)), layout_of(e));
  if (e.which == 1) {
    check_sample_index(array, e.request, e.request.end, "input");
    return check_rows(array, e);
  }
  const std::int64_t low = e.which == 0 ? e.request.begin : 0;
  if (e.which == 0) {
    check_document_index(array, e.request, "input");
  } else {
    check_shuffle_index(array, e.request.end, "input");
  }
  for (std::int64_t i = 0; i < array.size(); ++i)
    fuzz::require(array[i] >= low && array[i] < e.request.end, "a number leads out of the data");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 8) return 0;
  Expected e{data[0] % 3, (data[0] & 128) != 0, data[1] + 1, {}};
  e.request.begin = data[2];
  e.request.end = data[2] + data[3];
  e.request.seq_length = 1 + data[4];
  fuzz::accepts<DataError>([&] { load(data + 8, size - 8, e); });
  return 0;
}
