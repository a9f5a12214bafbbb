/// JSON that lies beside data: a dataset's record, and the record of a tokenizer.

#include "data/json_depth.hpp"
#include "fuzz.hpp"
#include "tessera/base/error.hpp"
#include "tessera/data/tokenizer_record.hpp"

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text(fuzz::text_of(data, size));
  TokenizerRecord record;
  const auto read = [&] {
    refuse_deep_json(text, "input");
    record = tokenizer_record_from_json(text, "input");
  };
  if (!fuzz::accepts<DataError>(read)) return 0;
  const TokenizerRecord again = tokenizer_record_from_json(to_json(record), "what was written");
  fuzz::require(same_ids(again, record) && again.end_of_document == record.end_of_document,
                "what was read is not read back the same");
  return 0;
}
