#include "cli/serve/desk.hpp"

#include <utility>

namespace tessera::cli::serving {
namespace {

/// Texts that are computed at once for a request.
std::int64_t rows_of(const GenerationOptions& o) { return o.num_beams > 1 ? o.num_beams : o.num_samples; }

}  // namespace

Ticket::~Ticket() {
  for (const std::uint64_t id : ids_) desk_.cancel(id);
}

std::optional<TextNews> Ticket::next(std::chrono::milliseconds wait) {
  std::unique_lock lock(inbox_->mutex);
  if (!inbox_->changed.wait_for(lock, wait, [&] { return !inbox_->news.empty(); })) return std::nullopt;
  TextNews news = std::move(inbox_->news.front());
  inbox_->news.pop_front();
  return news;
}

void Ticket::cancel(std::size_t index) { desk_.cancel(ids_.at(index)); }

std::unique_ptr<Ticket> Desk::submit(std::vector<TextRequest> requests) {
  std::int64_t texts = 0;
  for (const TextRequest& each : requests) {
    check_(each);
    texts += rows_of(each.options);
  }
  auto inbox = std::make_shared<Inbox>();
  std::vector<std::uint64_t> ids;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) throw Refused{true};
    if (texts_ + texts > most_texts_) throw Refused{false};
    for (TextRequest& each : requests) {
      each.id = next_id_++;
      ids.push_back(each.id);
      known_[each.id] = {inbox, rows_of(each.options)};
      texts_ += known_[each.id].texts;
      orders_.requests.push_back(std::move(each));
    }
  }
  came_.notify_one();
  return std::make_unique<Ticket>(*this, std::move(ids), std::move(inbox));
}

void Desk::cancel(std::uint64_t id) {
  const std::lock_guard lock(mutex_);
  const auto at = known_.find(id);
  if (at == known_.end()) return;
  texts_ -= at->second.texts;
  known_.erase(at);
  // One that nobody computes yet is never given out.
  if (std::erase_if(orders_.requests, [&](const TextRequest& each) { return each.id == id; }) == 0)
    orders_.cancelled.push_back(id);
  came_.notify_one();
}

ContinuousGenerator::Orders Desk::take(std::chrono::milliseconds wait) {
  std::unique_lock lock(mutex_);
  came_.wait_for(lock, wait, [&] { return !orders_.requests.empty() || !orders_.cancelled.empty(); });
  return std::exchange(orders_, {});
}

void Desk::deliver(std::vector<TextNews> news) {
  for (TextNews& each : news) {
    std::shared_ptr<Inbox> inbox;
    {
      const std::lock_guard lock(mutex_);
      const auto at = known_.find(each.id);
      if (at != known_.end()) inbox = at->second.inbox;
    }
    if (inbox == nullptr) continue;
    {
      const std::lock_guard lock(inbox->mutex);
      inbox->news.push_back(std::move(each));
    }
    inbox->changed.notify_one();
  }
}

void Desk::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
}

void Desk::abandon(const std::string& why) {
  std::vector<TextNews> news;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, known] : known_) {
      TextNews& each = news.emplace_back();
      each.id = id;
      each.done = true;
      each.failure = why;
    }
  }
  deliver(std::move(news));
}

std::int64_t Desk::texts() const {
  const std::lock_guard lock(mutex_);
  return texts_;
}

}  // namespace tessera::cli::serving
