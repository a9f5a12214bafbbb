#include "comm/store_requests.hpp"

namespace tessera::store {
namespace {

constexpr std::int64_t kMostRanks = 1 << 24;

}  // namespace

bool parse_request(std::string_view body, Request& request) {
  Reader reader(body);
  char kind = 0;
  if (!reader.kind(kind) || !reader.text(request.key) || request.key.size() > kStoreTextLimit) return false;
  request.operation = static_cast<Operation>(kind);
  switch (request.operation) {
    case Operation::set:
      return reader.text(request.value) && request.value.size() <= kStoreTextLimit && reader.finished();
    case Operation::get:
      return reader.number(request.timeout_ms) && reader.finished();
    case Operation::add:
      return reader.number(request.amount) && reader.finished();
    case Operation::remove:
      return reader.finished();
    case Operation::barrier:
      return reader.number(request.rank) && reader.number(request.size) &&
             reader.number(request.timeout_ms) && reader.finished() && request.size >= 1 &&
             request.size <= kMostRanks && request.rank >= 0 && request.rank < request.size;
  }
  return false;
}

bool parse_answer(std::string_view body, Outcome& outcome, std::string& text) {
  Reader reader(body);
  char kind = 0;
  if (!reader.kind(kind) || !reader.text(text) || !reader.finished()) return false;
  outcome = static_cast<Outcome>(kind);
  return outcome == Outcome::done || outcome == Outcome::late || outcome == Outcome::refused ||
         outcome == Outcome::cut;
}

}  // namespace tessera::store
