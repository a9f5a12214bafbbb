#include "cli/serve/service.hpp"

#include <array>

namespace tessera::cli::serving {

std::vector<std::int32_t> Texts::encode(const std::string& text, const std::string& param) {
  std::vector<std::int32_t> ids;
  try {
    const std::lock_guard lock(mutex_);
    ids = tokenizer_->encode(text);
  } catch (const DataError& error) {
    throw BadRequest{400, detail::concat(param, " cannot be tokenized: ", error.what()), param};
  }
  ends_.finish_prompt(ids);
  return ids;
}

std::string Texts::decode(const std::vector<std::int32_t>& ids) {
  const std::lock_guard lock(mutex_);
  return tokenizer_->decode(ends_.shown(ids));
}

std::vector<std::string> Texts::pieces(const std::vector<std::int32_t>& ids) {
  std::vector<std::string> result;
  const std::lock_guard lock(mutex_);
  for (const std::int32_t id : ids) {
    // Ids of a vocabulary that was padded have no text.
    result.push_back(id < ends_.vocab_size ? tokenizer_->decode(std::array{id}) : "");
  }
  return result;
}

std::unique_ptr<Ticket> Service::submit(std::vector<TextRequest> requests, const std::string& param) const {
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const std::string which = requests.size() == 1 ? param : detail::concat(param, "[", i, "]");
    const auto length = static_cast<std::int64_t>(requests[i].prompt.size());
    if (length == 0)
      throw BadRequest{400, which + " is empty: generation needs at least one token to begin with", param};
    if (length > max_prompt)
      throw BadRequest{400,
                       detail::concat(which, " has ", length, " tokens, more than the ", max_prompt,
                                      " that are taken here"),
                       param};
  }
  try {
    return desk.submit(std::move(requests));
  } catch (const InvalidArgument& error) {
    throw BadRequest{400, error.what(), param};
  } catch (const Refused& refused) {
    if (refused.ending) throw BadRequest{503, "the server is shutting down"};
    throw BadRequest{429, "too many texts are waiting: ask again later"};
  }
}

HttpReply respond(const Service& service, const HttpCall& call) {
  const Json about{{"id", service.model}, {"object", "model"}, {"owned_by", "tessera"}};
  struct Route {
    const char *method, *path;
    std::function<HttpReply()> answer;
  };
  const std::array routes{
      Route{"GET", "/health", [] { return HttpReply{.body = R"({"status":"ok"})"}; }},
      Route{"GET", "/v1/models",
            [&] {
              return HttpReply{.body = Json{{"object", "list"}, {"data", {about}}}.dump()};
            }},
      Route{"POST", "/v1/completions", [&] { return complete(service, call); }},
      Route{"PUT", "/api", [&] { return megatron_api(service, call); }},
      Route{"POST", "/api", [&] { return megatron_api(service, call); }}};
  bool known = false;
  for (const Route& route : routes) {
    if (call.path != route.path) continue;
    known = true;
    if (call.method == route.method || (call.method == "HEAD" && std::string_view(route.method) == "GET"))
      return route.answer();
  }
  if (known) throw BadRequest{405, detail::concat(call.path, " is not asked by ", call.method)};
  throw BadRequest{
      404, detail::concat("there is no ", call.path, ": see /v1/completions, /api, /v1/models and /health")};
}

}  // namespace tessera::cli::serving
