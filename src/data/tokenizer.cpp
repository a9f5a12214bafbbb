#include "tessera/data/tokenizer.hpp"

#include "data/python_tokenizer.hpp"
#include "data/tokenizer_options.hpp"
#include "tessera/base/error.hpp"

namespace tessera {

std::vector<std::int32_t> Tokenizer::encode(std::string_view text) {
  const std::string copy(text);
  return std::move(encode_batch(std::span(&copy, 1)).front());
}

std::vector<std::vector<std::int32_t>> ByteTokenizer::encode_batch(std::span<const std::string> texts) {
  std::vector<std::vector<std::int32_t>> out;
  out.reserve(texts.size());
  for (const std::string& text : texts) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(text.data());
    out.emplace_back(bytes, bytes + text.size());
  }
  return out;
}

std::string ByteTokenizer::decode(std::span<const std::int32_t> ids) {
  std::string text;
  for (const std::int32_t id : ids) {
    TESSERA_ENSURE(DataError, id >= 0 && id <= 256, "token id ", id,
                   " is not one of the byte tokenizer's 0 to 256");
    if (id < 256) text += static_cast<char>(id);
  }
  return text;
}

std::unique_ptr<Tokenizer> make_tokenizer(const TokenizerOptions& options) {
  const TokenizerOptions settled = settle(options);
  if (settled.type == "bytes") return std::make_unique<ByteTokenizer>();
  return std::make_unique<PythonTokenizer>(settled);
}

}  // namespace tessera
