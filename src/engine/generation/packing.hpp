#pragma once
/// Values as bytes, for other ranks of the same program.

#include <cstring>
#include <string>
#include <vector>

#include "tessera/base/error.hpp"
#include "tessera/engine/generate.hpp"

namespace tessera::generation {

template <typename T>
void put(std::string& to, const T& value) {
  to.append(reinterpret_cast<const char*>(&value), sizeof(T));
}
template <typename T>
void put(std::string& to, const std::vector<T>& values) {
  put(to, values.size());
  to.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}
inline void put(std::string& to, const std::string& value) {
  put(to, value.size());
  to += value;
}
inline void put(std::string& to, const GeneratedText& text) {
  put(to, text.tokens);
  put(to, text.logprobs);
  put(to, text.top_logprobs.size());
  for (const auto& likeliest : text.top_logprobs) put(to, likeliest);
  put(to, text.score);
  put(to, text.stopped);
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
    TESSERA_ENSURE(CommunicationError, count <= (from_.size() - at_) / sizeof(T), kCut);
    values.resize(count);
    read(values.data(), count * sizeof(T));
  }
  void get(std::string& value) {
    std::size_t count = 0;
    get(count);
    TESSERA_ENSURE(CommunicationError, count <= from_.size() - at_, kCut);
    value.resize(count);
    read(value.data(), count);
  }
  void get(GeneratedText& text) {
    get(text.tokens);
    get(text.logprobs);
    std::size_t places = 0;
    get(places);
    for (std::size_t i = 0; i < places; ++i) get(text.top_logprobs.emplace_back());
    get(text.score);
    get(text.stopped);
  }

 private:
  static constexpr const char* kCut = "generated texts were cut on their way";

  void read(void* to, std::size_t bytes) {
    TESSERA_ENSURE(CommunicationError, bytes <= from_.size() - at_, kCut);
    if (bytes > 0) std::memcpy(to, from_.data() + at_, bytes);
    at_ += bytes;
  }
  const std::string& from_;
  std::size_t at_ = 0;
};

}  // namespace tessera::generation
