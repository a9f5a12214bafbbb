/// What a store's server and client are told, frame after frame, and the server's barriers under it.

#include "comm/store_barriers.hpp"
#include "comm/store_requests.hpp"
#include "fuzz.hpp"

using namespace tessera::store;

namespace {

std::string write(const Request& request) {
  Writer writer(static_cast<char>(request.operation));
  writer.text(request.key);
  if (request.operation == Operation::set) writer.text(request.value);
  if (request.operation == Operation::get) writer.number(request.timeout_ms);
  if (request.operation == Operation::add) writer.number(request.amount);
  if (request.operation == Operation::barrier)
    writer.number(request.rank).number(request.size).number(request.timeout_ms);
  return writer.body();
}

/// A rank comes to a barrier; with an odd timeout it gives up.
void arrive(Barriers& barriers, const Request& request) {
  if (!barriers.arrive(request.key, request.rank, request.size).empty()) return;
  if (barriers.complete(request.key)) return;
  tessera::fuzz::require(barriers.missing(request.key).size() < 65536, "a list that nobody reads");
  if (request.timeout_ms % 2 != 0) barriers.leave(request.key, request.rank);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::string_view rest = tessera::fuzz::text_of(data, size);
  Barriers barriers;
  while (rest.size() >= 4) {
    const std::size_t length = frame_length(rest.data());
    if (length > kLongestFrame || length > rest.size() - 4) break;
    const std::string_view body = rest.substr(4, length);
    Request request;
    if (parse_request(body, request)) {
      tessera::fuzz::require(write(request) == body, "a request is not written as it was read");
      if (request.operation == Operation::barrier) arrive(barriers, request);
    }
    Outcome outcome;
    std::string text;
    if (parse_answer(body, outcome, text))
      tessera::fuzz::require(Writer(static_cast<char>(outcome)).text(text).body() == body,
                             "an answer is not written as it was read");
    rest.remove_prefix(4 + length);
  }
  return 0;
}
