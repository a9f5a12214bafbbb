#include "engine/generation/results.hpp"

#include <cstring>

#include "tessera/comm/bytes.hpp"

namespace tessera::generation {
namespace {

template <typename T>
void put(std::string& to, const T& value) {
  to.append(reinterpret_cast<const char*>(&value), sizeof(T));
}
template <typename T>
void put(std::string& to, const std::vector<T>& values) {
  put(to, values.size());
  to.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

/// Reads what put() wrote; all of it is another rank's of the same program.
class Reader {
 public:
  explicit Reader(const std::string& from) : from_(from) {}
  bool more() const { return at_ < from_.size(); }
  template <typename T>
  void get(T& value) {
    read(&value, sizeof(T));
  }
  template <typename T>
  void get(std::vector<T>& values) {
    std::size_t count = 0;
    get(count);
    TESSERA_ENSURE(CommunicationError, count <= (from_.size() - at_) / sizeof(T),
                   "generated texts were cut on their way");
    values.resize(count);
    read(values.data(), count * sizeof(T));
  }

 private:
  void read(void* to, std::size_t bytes) {
    TESSERA_ENSURE(CommunicationError, bytes <= from_.size() - at_, "generated texts were cut on their way");
    if (bytes > 0) std::memcpy(to, from_.data() + at_, bytes);
    at_ += bytes;
  }
  const std::string& from_;
  std::size_t at_ = 0;
};

std::string packed(const std::vector<Generated>& all) {
  std::string bytes = "+";
  for (const Generated& texts : all) {
    put(bytes, texts.size());
    for (const GeneratedText& text : texts) {
      put(bytes, text.tokens);
      put(bytes, text.logprobs);
      put(bytes, text.score);
      put(bytes, text.stopped);
    }
  }
  return bytes;
}

void unpack(const std::string& bytes, std::vector<Generated>& all) {
  Reader reader(bytes);
  char first = 0;
  reader.get(first);
  while (reader.more()) {
    std::size_t count = 0;
    reader.get(count);
    Generated& texts = all.emplace_back();
    for (std::size_t i = 0; i < count; ++i) {
      GeneratedText& text = texts.emplace_back();
      reader.get(text.tokens);
      reader.get(text.logprobs);
      reader.get(text.score);
      reader.get(text.stopped);
    }
  }
}

}  // namespace

std::vector<Generated> share_results(Communicator& world, const MeshShape& shape, bool speaks,
                                     const std::string& failure, const std::vector<Generated>& own) {
  std::string mine;
  if (speaks) mine = failure.empty() ? packed(own) : "-" + failure;
  const std::vector<std::string> told = all_gather_bytes(world, mine);
  std::vector<Generated> all;
  for (const std::string& each : told) TESSERA_CHECK(each.empty() || each[0] != '-', each.substr(1));
  // By data rank, as the prompts were shared out.
  for (int dp = 0; dp < shape.dp; ++dp) {
    for (std::size_t rank = 0; rank < told.size(); ++rank) {
      if (!told[rank].empty() && coordinates_of(shape, static_cast<int>(rank)).dp == dp)
        unpack(told[rank], all);
    }
  }
  return all;
}

}  // namespace tessera::generation
