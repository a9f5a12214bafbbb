#pragma once
/// What a client asks a store's server, and what it is told, as the bodies of frames. Nothing here is
/// trusted.

#include <string>
#include <string_view>

#include "comm/store_wire.hpp"

namespace tessera::store {

struct Request {
  Operation operation = Operation::get;
  std::string key;
  std::string value;                ///< set
  std::int64_t timeout_ms = 0;      ///< get, barrier
  std::int64_t amount = 0;          ///< add
  std::int64_t rank = 0, size = 0;  ///< barrier
};

/// False for what no client of ours sends.
bool parse_request(std::string_view body, Request& request);
/// False for what no server of ours sends.
bool parse_answer(std::string_view body, Outcome& outcome, std::string& text);

}  // namespace tessera::store
