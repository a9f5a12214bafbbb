#include <algorithm>
#include <chrono>
#include <limits>

#include "cli/serve/growing_text.hpp"

namespace tessera::cli::serving {
namespace {

constexpr std::int64_t kMostSamples = 128, kMostLogprobs = 20, kMostStops = 16;

/// What a client asks for.
struct CompletionFields {
  std::vector<std::vector<std::int32_t>> prompts;
  GenerationOptions options;
  std::vector<std::string> stops;
  bool echo = false, stream = false, usage = false;
  std::optional<std::int64_t> logprobs;
};

bool are_ids(const Json& list) {
  for (const Json& each : list)
    if (!each.is_number_integer()) return false;
  return !list.empty();
}

std::vector<std::int32_t> ids_of(const Json& list, const std::string& param) {
  std::vector<std::int32_t> ids;
  for (const Json& each : list) {
    const double id = each.get<double>();
    if (id < 0 || id > std::numeric_limits<std::int32_t>::max())
      throw BadRequest{400, detail::concat(param, " has the token ", each.dump(), ", which is none"),
                       "prompt"};
    ids.push_back(static_cast<std::int32_t>(id));
  }
  return ids;
}

std::vector<std::vector<std::int32_t>> read_completion_prompts(Texts& texts, Fields& fields) {
  const Json* prompt = fields.any("prompt");
  if (prompt == nullptr)
    throw BadRequest{400, "prompt is missing: a string, token ids, or a list of these", "prompt"};
  if (prompt->is_string()) return {texts.encode(prompt->get<std::string>(), "prompt")};
  const bool list = prompt->is_array() && !prompt->empty();
  if (list && are_ids(*prompt)) return {ids_of(*prompt, "prompt")};
  if (!list)
    throw BadRequest{400, "prompt must be a string, token ids, or a list of these that is not empty",
                     "prompt"};
  if (static_cast<std::int64_t>(prompt->size()) > kMostPrompts)
    throw BadRequest{
        400, detail::concat("prompt has ", prompt->size(), " prompts, at most ", kMostPrompts, " are taken"),
        "prompt"};
  std::vector<std::vector<std::int32_t>> prompts;
  for (std::size_t i = 0; i < prompt->size(); ++i) {
    const Json& each = (*prompt)[i];
    const std::string which = detail::concat("prompt[", i, "]");
    if (each.is_string()) {
      prompts.push_back(texts.encode(each.get<std::string>(), which));
    } else if (each.is_array() && are_ids(each)) {
      prompts.push_back(ids_of(each, which));
    } else {
      throw BadRequest{400, which + " must be a string, or token ids that are whole numbers", "prompt"};
    }
  }
  return prompts;
}

std::vector<std::string> read_stops(Fields& fields) {
  const Json* stop = fields.any("stop");
  if (stop == nullptr) return {};
  const Json list = stop->is_array() ? *stop : Json::array({*stop});
  bool fits = static_cast<std::int64_t>(list.size()) <= kMostStops;
  for (const Json& each : list) fits = fits && each.is_string() && !each.get<std::string>().empty();
  if (!fits)
    throw BadRequest{
        400, detail::concat("stop must be a string that is not empty, or a list of at most ", kMostStops),
        "stop"};
  return list.get<std::vector<std::string>>();
}

void read_completion_sampling(const Service& service, Fields& fields, CompletionFields& wanted) {
  GenerationOptions& o = wanted.options;
  o.max_new_tokens = fields.whole("max_tokens", 0, kMost).value_or(16);
  o.min_new_tokens = fields.whole("min_tokens", 0, o.max_new_tokens).value_or(0);
  o.temperature = fields.number("temperature", 0, 100).value_or(1.0);
  o.top_p = fields.number("top_p", 0, 1).value_or(1.0);
  if (o.top_p == 1.0) o.top_p = 0.0;
  o.top_k = std::max<std::int64_t>(0, fields.whole("top_k", -1, kMost).value_or(0));
  o.repetition_penalty = fields.number("repetition_penalty", 1e-6, 1e6).value_or(1.0);
  o.num_samples = fields.whole("n", 1, kMostSamples).value_or(1);
  const auto seed = fields.whole("seed", std::numeric_limits<std::int64_t>::min(),
                                 std::numeric_limits<std::int64_t>::max());
  o.seed = seed ? static_cast<std::uint64_t>(*seed) : service.random_seed();
  if (const auto best = fields.whole("best_of", 1, kMostSamples); best && *best != o.num_samples)
    throw BadRequest{400,
                     detail::concat("best_of ", *best, " is not supported: it is n (", o.num_samples, ")"),
                     "best_of"};
  o.decoder_start = service.texts.ends().start;
  if (service.texts.ends().end >= 0 && !fields.flag("ignore_eos").value_or(false))
    o.stop_tokens = {service.texts.ends().end};
}

CompletionFields read_completion(const Service& service, const Json& body) {
  Fields fields(body);
  CompletionFields wanted;
  const auto model = fields.text("model");
  if (model && *model != service.model)
    throw BadRequest{
        404, detail::concat("there is no model ", Json(*model).dump(), " here, it is ", service.model),
        "model"};
  read_completion_sampling(service, fields, wanted);
  wanted.stops = read_stops(fields);
  wanted.echo = fields.flag("echo").value_or(false);
  wanted.stream = fields.flag("stream").value_or(false);
  wanted.logprobs = fields.whole("logprobs", 0, kMostLogprobs);
  if (wanted.logprobs) {
    wanted.options.logprobs = true;
    wanted.options.top_logprobs = *wanted.logprobs;
    wanted.options.prompt_logprobs = wanted.echo;
  }
  if (const Json* options = fields.any("stream_options")) {
    if (!options->is_object() || !wanted.stream)
      throw BadRequest{400, "stream_options must be an object, and goes with stream", "stream_options"};
    Fields inner(*options);
    wanted.usage = inner.flag("include_usage").value_or(false);
    inner.finish();
  }
  fields.only("presence_penalty", 0, "there is repetition_penalty");
  fields.only("frequency_penalty", 0, "there is repetition_penalty");
  fields.only("logit_bias", Json::object(), "tokens are as likely as the model says");
  fields.only("suffix", "", "texts are continued at their end");
  fields.text("user");
  wanted.prompts = read_completion_prompts(service.texts, fields);
  fields.finish();
  if (wanted.options.max_new_tokens == 0 && !(wanted.echo && wanted.logprobs))
    throw BadRequest{400,
                     "max_tokens 0 writes nothing: it goes with echo and logprobs, which score the prompt",
                     "max_tokens"};
  return wanted;
}

bool is_utf8(const std::string& text) {
  try {
    static_cast<void>(Json(text).dump());
  } catch (const Json::type_error&) {
    return false;
  }
  return true;
}

/// A token's name as OpenAI writes it where it is a part of a character: bytes:\\xe2\\x80.
std::string name_of(const std::string& piece) {
  if (is_utf8(piece)) return piece;
  std::string name = "bytes:";
  for (const char c : piece) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    const auto byte = static_cast<unsigned char>(c);
    name += {'\\', 'x', kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return name;
}

/// The probabilities of the tokens of a text, with echo those of its prompt before them.
Json told(const CompletionFields& wanted, Texts& texts, const std::vector<std::int32_t>& prompt,
          const GrowingText& text) {
  std::vector<std::int32_t> ids = wanted.echo ? prompt : std::vector<std::int32_t>();
  const std::size_t unknown = wanted.echo ? 1 : 0;  // nothing stands before the first
  ids.insert(ids.end(), text.tokens().begin(), text.tokens().end());
  const std::vector<std::string> pieces = texts.pieces(ids);
  Json names = Json::array(), offsets = Json::array(), probabilities = Json::array(), top = Json::array();
  std::size_t at = 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    names.push_back(name_of(pieces[i]));
    offsets.push_back(at);
    at +=
        static_cast<std::size_t>(std::ranges::count_if(pieces[i], [](char c) { return (c & 0xc0) != 0x80; }));
    const bool has = i >= unknown && i - unknown < text.logprobs().size();
    probabilities.push_back(has ? Json(text.logprobs()[i - unknown]) : Json());
    Json likeliest;
    if (has && i - unknown < text.top_logprobs().size()) {
      const auto& best = text.top_logprobs()[i - unknown];
      std::vector<std::int32_t> best_ids;
      for (const TokenLogprob& each : best) best_ids.push_back(each.token);
      const std::vector<std::string> best_pieces = texts.pieces(best_ids);
      likeliest = Json::object();
      for (std::size_t j = 0; j < best.size(); ++j)
        likeliest.emplace(name_of(best_pieces[j]), best[j].logprob);
    }
    top.push_back(likeliest);
  }
  Json result{{"tokens", names},
              {"token_logprobs", probabilities},
              {"top_logprobs", nullptr},
              {"text_offset", offsets}};
  if (wanted.options.top_logprobs > 0) result["top_logprobs"] = top;
  return result;
}

/// A request that is being answered.
class Completion {
 public:
  Completion(const Service& service, CompletionFields wanted, const HttpCall& call)
      : service_(service), wanted_(std::move(wanted)), gone_(call.gone) {
    std::vector<TextRequest> requests;
    for (const auto& prompt : wanted_.prompts) {
      requests.push_back({0, prompt, wanted_.options});
      texts_.emplace_back(static_cast<std::size_t>(wanted_.options.num_samples),
                          GrowingText(service.texts, wanted_.stops));
      shown_.emplace_back(texts_.back().size(), 0);
    }
    ticket_ = service_.submit(std::move(requests), "prompt");
  }

  /// Until all is done. Errors: BadRequest.
  HttpReply whole() {
    while (!done()) {
      take();
      if (gone_()) throw BadRequest{499, "the client has closed its connection"};
    }
    Json choices = Json::array();
    for (std::size_t i = 0; i < texts_.size(); ++i) {
      for (std::size_t s = 0; s < texts_[i].size(); ++s)
        choices.push_back(choice(i, s, prefix(i) + texts_[i][s].shown(), true));
    }
    Json body = head();
    body["choices"] = choices;
    body["usage"] = usage();
    return {.body = dump(body)};
  }

  /// The same in pieces. Never throws.
  void stream(const Write& write) {
    try {
      send_pieces(write);
    } catch (const BadRequest& bad) {
      write("data: " + error_body(bad) + "\n\n");
    } catch (const std::exception& error) {
      write("data: " + error_body({500, error.what()}) + "\n\n");
    }
  }

 private:
  static std::string dump(const Json& json) {
    return json.dump(-1, ' ', false, Json::error_handler_t::replace);
  }

  void send_pieces(const Write& write) {
    while (!done()) {
      GrowingText* text = take();
      if (!write("")) return;
      if (text == nullptr) continue;
      if (!send_piece(write)) return;
    }
    if (wanted_.usage) {
      Json body = head();
      body["choices"] = Json::array();
      body["usage"] = usage();
      if (!write("data: " + dump(body) + "\n\n")) return;
    }
    write("data: [DONE]\n\n");
  }

  /// What is new of the text that had news.
  bool send_piece(const Write& write) {
    const auto [i, s] = last_;
    const GrowingText& text = texts_[i][s];
    std::string all = prefix(i) + text.shown();
    std::size_t& shown = shown_[i][s];
    std::string piece = all.size() > shown ? all.substr(shown) : "";
    // Probabilities come with the last piece: before that a token may still turn out to be part of a stop
    // text.
    if (piece.empty() && !text.done()) return true;
    shown = std::max(shown, all.size());
    Json body = head();
    body["choices"] = {choice(i, s, piece, text.done())};
    return write("data: " + dump(body) + "\n\n");
  }

  std::string prefix(std::size_t i) const {
    return wanted_.echo ? service_.texts.decode(wanted_.prompts[i]) : "";
  }

  bool done() const {
    for (const auto& of_prompt : texts_)
      for (const GrowingText& text : of_prompt)
        if (!text.done()) return false;
    return true;
  }

  /// The next news of a text that is not done, or null. Errors: BadRequest.
  GrowingText* take() {
    const std::optional<TextNews> news = ticket_->next(kLook);
    if (!news) return nullptr;
    if (!news->failure.empty()) throw BadRequest{500, news->failure};
    last_ = {ticket_->index(news->id), static_cast<std::size_t>(news->sample)};
    auto& of_prompt = texts_[last_.first];
    GrowingText& text = of_prompt[last_.second];
    if (text.done()) return nullptr;
    text.take(*news);
    const bool all = std::ranges::all_of(of_prompt, [](const GrowingText& each) { return each.done(); });
    if (all) ticket_->cancel(last_.first);
    return &text;
  }

  Json head() const {
    return {{"id", id_}, {"object", "text_completion"}, {"created", created_}, {"model", service_.model}};
  }

  Json choice(std::size_t i, std::size_t s, const std::string& shown, bool whole) const {
    const GrowingText& text = texts_[i][s];
    Json result{{"text", shown},
                {"index", i * texts_[i].size() + s},
                {"logprobs", nullptr},
                {"finish_reason", nullptr}};
    if (whole) result["finish_reason"] = text.finish_reason();
    if (whole && wanted_.logprobs)
      result["logprobs"] = told(wanted_, service_.texts, wanted_.prompts[i], text);
    return result;
  }

  Json usage() const {
    std::int64_t prompt = 0, written = 0;
    for (const auto& each : wanted_.prompts) prompt += static_cast<std::int64_t>(each.size());
    for (const auto& of_prompt : texts_)
      for (const GrowingText& text : of_prompt) written += text.computed();
    return {{"prompt_tokens", prompt}, {"completion_tokens", written}, {"total_tokens", prompt + written}};
  }

  Service service_;
  CompletionFields wanted_;
  std::function<bool()> gone_;
  std::string id_ = detail::concat("cmpl-", service_.random_seed());
  std::int64_t created_ =
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch())
          .count();
  std::vector<std::vector<GrowingText>> texts_;  ///< by prompt and sample
  std::vector<std::vector<std::size_t>> shown_;  ///< bytes that were sent
  std::pair<std::size_t, std::size_t> last_;     ///< the text that had news
  std::unique_ptr<Ticket> ticket_;
};

}  // namespace

HttpReply complete(const Service& service, const HttpCall& call) {
  CompletionFields wanted = read_completion(service, parse_body(call.body));
  const bool stream = wanted.stream;
  auto completion = std::make_shared<Completion>(service, std::move(wanted), call);
  if (!stream) return completion->whole();
  return {.stream = [completion](const Write& write) { completion->stream(write); }};
}

}  // namespace tessera::cli::serving
