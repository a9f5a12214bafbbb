#include "cli/text_ends.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tessera/checkpoint/hf.hpp"
#include "tessera/comm/bytes.hpp"
#include "tessera/data/t5_dataset.hpp"
#include "tessera/data/tokenizer_record.hpp"

namespace tessera::cli {
namespace {

using Json = nlohmann::ordered_json;

/// What texts begin and end with whose prompts an encoder reads: as samples of training do.
Json ends_of_encoded(const LoadedModel& loaded, const ModelArguments& a, const Tokenizer& tokenizer) {
  const DataConfig& data = loaded.config.data;
  const TokenizerOptions given = tokenizer_options(loaded, a.tokenizer);
  SpecialTokens special = given.type == "bytes" ? SpecialTokens() : special_tokens(given);
  const auto take = [](const std::optional<std::int64_t>& from, std::int32_t& to) {
    if (from) to = static_cast<std::int32_t>(*from);
  };
  take(data.bos_id, special.bos);
  take(data.eos_id, special.eos);
  take(data.pad_id, special.pad);
  std::int64_t ids = tokenizer.vocab_size();
  add_t5_tokens(special, ids, data.vocab_extra_ids);
  return {std::max(special.bos, 0), special.eos >= 0 ? special.eos : tokenizer.end_of_document()};
}

}  // namespace

TextEnds text_ends(const LoadedModel& loaded, const ModelArguments& a, Tokenizer* tokenizer,
                   Communicator& world) {
  TextEnds result;
  result.encodes = loaded.engine->model().reads_encoder_tokens();
  Json ends;
  if (world.rank() == 0) {
    if (result.encodes) {
      ends = ends_of_encoded(loaded, a, *tokenizer);
    } else {
      ends = {0, loaded.tokenizer ? loaded.tokenizer->end_of_document : tokenizer->end_of_document()};
    }
    ends.push_back(tokenizer->vocab_size());
  }
  // Ranks without a tokenizer take rank 0's word for it.
  if (world.size() > 1) ends = Json::parse(broadcast_bytes(world, world.rank() == 0 ? ends.dump() : ""));
  result.start = ends[0].get<std::int32_t>();
  result.end = ends[1].get<std::int32_t>();
  result.vocab_size = ends[2].get<std::int64_t>();
  result.prompts_end = result.encodes && result.end >= 0 && is_model_folder(a.model);
  return result;
}

}  // namespace tessera::cli
