#include "checkpoint/megatron_values.hpp"

#include "checkpoint/file_io.hpp"
#include "tessera/base/error.hpp"

namespace tessera::checkpoint_detail {

using Kind = PickleValue::Kind;

MegatronValues::MegatronValues(const PickleValue& values, std::filesystem::path file, std::string place)
    : values_(values), file_(std::move(file)), place_(std::move(place)) {
  if (!values_.is(Kind::dict) && !values_.is(Kind::object))
    bad_file(file_, place_, "are a " + values_.describe(),
             "They are a namespace in every checkpoint of Megatron.");
}

void MegatronValues::refuse(const std::string& name, const std::string& reason) const {
  bad_file(file_, place_ + "." + name, reason, "Convert such a model with the program that trained it.");
}

std::int64_t MegatronValues::integer(std::initializer_list<const char*> names, std::int64_t absent,
                                     std::int64_t most) const {
  const PickleValue* value = find(names);
  if (!value) return absent;
  if (!value->is(Kind::integer)) refuse(*names.begin(), "is a " + value->describe() + ", not an int");
  if (value->integer < 0 || value->integer > most)
    refuse(*names.begin(), detail::concat(value->integer, " is not within 0 and ", most));
  return value->integer;
}

std::int64_t MegatronValues::size(const char* name) const {
  const std::int64_t value = integer({name}, 0);
  if (value < 1) refuse(name, value == 0 ? "is missing" : "is not positive");
  return value;
}

double MegatronValues::real(std::initializer_list<const char*> names, double absent) const {
  const PickleValue* value = find(names);
  if (!value) return absent;
  if (value->is(Kind::integer)) return static_cast<double>(value->integer);
  if (!value->is(Kind::real)) refuse(*names.begin(), "is a " + value->describe() + ", not a float");
  return value->real;
}

std::optional<bool> MegatronValues::flag(const char* name) const {
  const PickleValue* value = find({name});
  if (!value) return std::nullopt;
  if (!value->is(Kind::boolean)) refuse(name, "is a " + value->describe() + ", not a bool");
  return value->integer != 0;
}

std::string MegatronValues::text(const char* name, const char* absent) const {
  const PickleValue* value = find({name});
  if (!value) return absent;
  if (!value->is(Kind::text)) refuse(name, "is a " + value->describe() + ", not a str");
  return value->text;
}

const PickleValue* MegatronValues::find(std::initializer_list<const char*> names) const {
  for (const char* name : names) {
    const PickleValue* value = values_.find(name);
    if (value && !value->is(Kind::none)) return value;
  }
  return nullptr;
}

}  // namespace tessera::checkpoint_detail
