#pragma once
/// Named values of a checkpoint of Megatron (its arguments, or the state of its schedule), each checked to be
/// of its kind.

#include <filesystem>
#include <initializer_list>
#include <optional>
#include <string>

#include "checkpoint/pickle.hpp"

namespace tessera::checkpoint_detail {

/// An absent value and None are the same. Where several names are given the first that is there counts.
/// Errors of all members: CheckpointError naming the value.
class MegatronValues {
 public:
  /// `values` outlives it.
  MegatronValues(const PickleValue& values, std::filesystem::path file, std::string place = "args");

  [[noreturn]] void refuse(const std::string& name, const std::string& reason) const;

  /// From 0 to `most`.
  std::int64_t integer(std::initializer_list<const char*> names, std::int64_t absent,
                       std::int64_t most = std::int64_t{1} << 28) const;
  /// A positive one that has to be there.
  std::int64_t size(const char* name) const;
  double real(std::initializer_list<const char*> names, double absent) const;
  std::optional<bool> flag(const char* name) const;
  std::string text(const char* name, const char* absent) const;
  bool holds(const char* name) const { return find({name}) != nullptr; }
  /// Null where there is none.
  const PickleValue* find(std::initializer_list<const char*> names) const;

 private:
  const PickleValue& values_;
  std::filesystem::path file_;
  std::string place_;
};

}  // namespace tessera::checkpoint_detail
