#include "engine/generation/orders.hpp"

#include "engine/generation/packing.hpp"

namespace tessera::generation {
namespace {

/// All that a request may ask for, in one order for both ways.
template <typename Options, typename Visit>
void visit_options(Options& o, Visit visit) {
  visit(o.max_new_tokens);
  visit(o.max_length);
  visit(o.decoder_start);
  visit(o.min_new_tokens);
  visit(o.temperature);
  visit(o.top_k);
  visit(o.top_p);
  visit(o.top_p_decay);
  visit(o.top_p_bound);
  visit(o.repetition_penalty);
  visit(o.seed);
  visit(o.first_sample);
  visit(o.num_samples);
  visit(o.stop_tokens);
  visit(o.logprobs);
  visit(o.prompt_logprobs);
  visit(o.top_logprobs);
  visit(o.num_beams);
  visit(o.num_return);
  visit(o.length_penalty);
  visit(o.early_stopping);
  visit(o.beam_rule);
}

}  // namespace

std::string packed(const PlacedOrders& orders) {
  std::string bytes;
  put(bytes, orders.end);
  put(bytes, orders.cancelled);
  for (const PlacedRequest& each : orders.requests) {
    put(bytes, each.data_rank);
    put(bytes, each.request.id);
    put(bytes, each.request.prompt);
    visit_options(each.request.options, [&](const auto& value) { put(bytes, value); });
  }
  return bytes;
}

PlacedOrders unpacked_orders(const std::string& bytes) {
  PlacedOrders orders;
  Reader reader(bytes);
  reader.get(orders.end);
  reader.get(orders.cancelled);
  while (reader.more()) {
    PlacedRequest& each = orders.requests.emplace_back();
    reader.get(each.data_rank);
    reader.get(each.request.id);
    reader.get(each.request.prompt);
    visit_options(each.request.options, [&](auto& value) { reader.get(value); });
  }
  return orders;
}

std::string packed(const std::vector<TextNews>& news) {
  std::string bytes;
  for (const TextNews& each : news) {
    put(bytes, each.id);
    put(bytes, each.sample);
    put(bytes, each.text);
    put(bytes, each.prompt_logprobs);
    put(bytes, each.done);
    put(bytes, each.failure);
  }
  return bytes;
}

std::vector<TextNews> unpacked_news(const std::string& bytes) {
  std::vector<TextNews> news;
  Reader reader(bytes);
  while (reader.more()) {
    TextNews& each = news.emplace_back();
    reader.get(each.id);
    reader.get(each.sample);
    reader.get(each.text);
    reader.get(each.prompt_logprobs);
    reader.get(each.done);
    reader.get(each.failure);
  }
  return news;
}

}  // namespace tessera::generation
