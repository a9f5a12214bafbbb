#include <algorithm>
#include <chrono>
#include <limits>

#include "cli/serve/growing_text.hpp"

namespace tessera::cli::serving {
namespace {

/// Names, ranges and defaults are those of the handler in megatron/core/inference/text_generation_server.
struct ApiFields {
  std::vector<std::vector<std::int32_t>> prompts;
  GenerationOptions options;
  std::vector<std::string> stops;
  bool logprobs = false;
};

std::vector<std::vector<std::int32_t>> read_api_prompts(Texts& texts, const Json* given, bool add_start) {
  const bool fits = given != nullptr && given->is_array() && !given->empty() &&
                    static_cast<std::int64_t>(given->size()) <= kMostPrompts;
  if (!fits)
    throw BadRequest{400, detail::concat("prompts must be a list of 1 to ", kMostPrompts, " strings"),
                     "prompts"};
  if (add_start && (texts.ends().end < 0 || texts.ends().encodes))
    throw BadRequest{400, "add_BOS needs a decoder whose tokenizer has an end of document", "add_BOS"};
  std::vector<std::vector<std::int32_t>> prompts;
  for (std::size_t i = 0; i < given->size(); ++i) {
    const std::string which = detail::concat("prompts[", i, "]");
    if (!(*given)[i].is_string()) throw BadRequest{400, which + " must be a string", "prompts"};
    std::vector<std::int32_t> ids;
    if (add_start) ids.push_back(texts.ends().end);
    const auto own = texts.encode((*given)[i].get<std::string>(), which);
    ids.insert(ids.end(), own.begin(), own.end());
    prompts.push_back(std::move(ids));
  }
  return prompts;
}

void read_api_sampling(const Service& service, Fields& fields, ApiFields& wanted) {
  GenerationOptions& o = wanted.options;
  o.max_new_tokens = fields.whole("tokens_to_generate", 0, kMost).value_or(64);
  o.temperature = fields.number("temperature", 0.0, 100.0).value_or(1.0);
  o.top_k = fields.whole("top_k", 0, kMost).value_or(0);
  o.top_p = fields.number("top_p", 0.0, 1.0).value_or(0.0);
  o.top_p_decay = fields.number("top_p_decay", 0.0, 1.0).value_or(0.0);
  o.top_p_bound = fields.number("top_p_bound", 0.0, 1.0).value_or(0.0);
  wanted.logprobs = fields.flag("logprobs").value_or(false);
  const auto seed = fields.whole("random_seed", -1, std::numeric_limits<std::int64_t>::max()).value_or(-1);
  o.seed = seed < 0 ? service.random_seed() : static_cast<std::uint64_t>(seed);
  o.decoder_start = service.texts.ends().start;
  const std::int64_t stop = fields.whole("stop_token", 0, kMost).value_or(service.texts.ends().end);
  if (stop >= 0) o.stop_tokens = {static_cast<std::int32_t>(stop)};
  const bool at_line = fields.flag("stop_on_eol").value_or(false);
  if (fields.flag("stop_on_double_eol").value_or(false)) wanted.stops.push_back("\n\n");
  if (at_line) wanted.stops.push_back("\n");
  fields.only("prevent_newline_after_colon", false, "a newline may follow a colon");
  fields.flag("no_log");
  const auto width = fields.whole("beam_width", 1, 1024);
  o.length_penalty = fields.number("length_penalty", -1e6, 1e6).value_or(1.0);
  if (!width) return;
  if (wanted.logprobs || !wanted.stops.empty())
    throw BadRequest{400, "beam_width does not go with logprobs, stop_on_eol and stop_on_double_eol",
                     "beam_width"};
  if (*width == 1) {
    o.temperature = 0.0;  // one beam is the likeliest token
    o.top_p_decay = 0.0;
  } else {
    o.num_beams = o.num_return = *width;
    o.beam_rule = BeamRule::megatron;
  }
}

ApiFields read_api(const Service& service, const Json& body) {
  Fields fields(body);
  ApiFields wanted;
  if (fields.any("max_len") != nullptr || fields.any("sentences") != nullptr)
    throw BadRequest{400, "max_len and sentences are no longer used: give tokens_to_generate and prompts"};
  read_api_sampling(service, fields, wanted);
  const bool beams = fields.any("beam_width") != nullptr;
  wanted.prompts =
      read_api_prompts(service.texts, fields.any("prompts"), fields.flag("add_BOS").value_or(false));
  fields.finish();
  if (beams && wanted.prompts.size() > 1) throw BadRequest{400, "beam_width goes with one prompt", "prompts"};
  if (wanted.options.max_new_tokens == 0 && !wanted.logprobs)
    throw BadRequest{400,
                     "tokens_to_generate 0 writes nothing: it goes with logprobs, which score the prompts",
                     "tokens_to_generate"};
  wanted.options.logprobs = wanted.logprobs;
  wanted.options.prompt_logprobs = wanted.logprobs && !service.texts.ends().encodes;
  return wanted;
}

/// Texts by prompt, of a beam search by rank, once all are written. Errors: BadRequest.
std::vector<GrowingText> write_texts(const Service& service, const ApiFields& wanted, const HttpCall& call,
                                     std::vector<double>& scores) {
  const bool beams = wanted.options.num_beams > 1;
  std::vector<TextRequest> requests;
  for (const auto& prompt : wanted.prompts) requests.push_back({0, prompt, wanted.options});
  std::vector<GrowingText> texts(
      beams ? static_cast<std::size_t>(wanted.options.num_return) : requests.size(),
      GrowingText(service.texts, wanted.stops, true));
  scores.resize(texts.size());
  const auto ticket = service.submit(std::move(requests), "prompts");
  while (!std::ranges::all_of(texts, [](const GrowingText& each) { return each.done(); })) {
    if (call.gone()) throw BadRequest{499, "the client has closed its connection"};
    const auto news = ticket->next(kLook);
    if (!news) continue;
    if (!news->failure.empty()) throw BadRequest{500, news->failure};
    const std::size_t index = ticket->index(news->id),
                      place = beams ? static_cast<std::size_t>(news->sample) : index;
    if (texts[place].done()) continue;
    texts[place].take(*news);
    scores[place] = news->text.score;
    if (texts[place].done() && !beams) ticket->cancel(index);
  }
  return texts;
}

}  // namespace

HttpReply megatron_api(const Service& service, const HttpCall& call) {
  const ApiFields wanted = read_api(service, parse_body(call.body));
  std::vector<double> scores;
  const std::vector<GrowingText> texts = write_texts(service, wanted, call, scores);
  Json all = Json::array(), segments = Json::array(), logprobs = Json::array();
  for (std::size_t i = 0; i < texts.size(); ++i) {
    std::vector<std::int32_t> ids;
    // What an encoder reads is no part of the text.
    if (!service.texts.ends().encodes) ids = wanted.prompts[wanted.options.num_beams > 1 ? 0 : i];
    ids.insert(ids.end(), texts[i].tokens().begin(), texts[i].tokens().end());
    all.push_back(service.texts.decode(ids));
    segments.push_back(service.texts.pieces(ids));
    logprobs.push_back(texts[i].logprobs());
  }
  Json body{{"text", all}, {"segments", segments}};
  if (wanted.options.num_beams > 1) {
    body["scores"] = scores;
  } else {
    body["logprobs"] = wanted.logprobs ? logprobs : Json();
  }
  return {.body = body.dump(-1, ' ', false, Json::error_handler_t::replace)};
}

}  // namespace tessera::cli::serving
