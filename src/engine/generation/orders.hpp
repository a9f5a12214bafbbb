#pragma once
/// What ranks tell each other between two rounds of continuous generation.

#include <string>
#include <vector>

#include "tessera/engine/continuous.hpp"

namespace tessera::generation {

/// A request, and the data rank that computes it.
struct PlacedRequest {
  TextRequest request;
  int data_rank = 0;
};

struct PlacedOrders {
  std::vector<PlacedRequest> requests;
  std::vector<std::uint64_t> cancelled;
  bool end = false;
};

std::string packed(const PlacedOrders& orders);
/// Errors: CommunicationError for bytes that are cut.
PlacedOrders unpacked_orders(const std::string& bytes);

std::string packed(const std::vector<TextNews>& news);
std::vector<TextNews> unpacked_news(const std::string& bytes);

}  // namespace tessera::generation
