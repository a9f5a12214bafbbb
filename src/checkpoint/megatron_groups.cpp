#include "checkpoint/megatron_groups.hpp"

#include <cmath>
#include <cstring>

#include "checkpoint/file_io.hpp"

namespace tessera::checkpoint_detail {

using Kind = PickleValue::Kind;

void OptimizerValues::fail(const std::string& where, const std::string& reason, const char* remedy) const {
  bad_file(file_.path(), where, reason, remedy);
}

double OptimizerValues::number(const PickleValue* value, double absent) {
  if (!value) return absent;
  if (value->is(Kind::integer)) return static_cast<double>(value->integer);
  return value->is(Kind::real) ? value->real : absent;
}

/// A number, or a tensor of one.
std::optional<double> OptimizerValues::scalar(const PickleValue* value) const {
  if (!value) return std::nullopt;
  if (value->is(Kind::integer) || value->is(Kind::real)) return number(value, 0);
  const auto tensor = file_.tensor(*value);
  if (!tensor || tensor->numel() != 1) return std::nullopt;
  std::byte bytes[8] = {};
  file_.read(*tensor, std::span(bytes).first(size_of(tensor->dtype)));
  float single = 0;
  double real = 0;
  std::int64_t whole = 0;
  switch (tensor->dtype) {
    case DType::f32:
      std::memcpy(&single, bytes, sizeof(single));
      return single;
    case DType::f64:
      std::memcpy(&real, bytes, sizeof(real));
      return real;
    case DType::i64:
      std::memcpy(&whole, bytes, sizeof(whole));
      return static_cast<double>(whole);
    case DType::i32: {
      std::int32_t narrow = 0;
      std::memcpy(&narrow, bytes, sizeof(narrow));
      return narrow;
    }
    default:
      return std::nullopt;
  }
}

void OptimizerValues::count(const PickleValue* value, const std::string& where) {
  const std::optional<double> found = scalar(value);
  if (!found) return;
  if (*found < 0 || *found > 1e15 || *found != std::floor(*found))
    fail(where, detail::concat(*found, " is no number of updates"));
  const auto updates = static_cast<std::int64_t>(*found);
  if (facts_.counted && updates != facts_.updates)
    fail(where, detail::concat("parameters have had ", facts_.updates, " and ", updates, " updates"),
         kWeightsAlone);
  facts_.updates = updates;
  facts_.counted = true;
}

/// What Tessera would go on with in another way.
void OptimizerValues::check_group(const PickleValue& group, const std::string& where) const {
  if (number(group.find("lr_mult"), 1) != 1)
    fail(where, "has a learning rate of its own (lr_mult)", kWeightsAlone);
  for (const char* name : {"is_decoupled_lr", "is_expert_parallel", "amsgrad", "maximize"}) {
    const PickleValue* value = group.find(name);
    if (value && value->is(Kind::boolean) && value->integer != 0)
      fail(where, detail::concat(name, " is true, which is not read"), kWeightsAlone);
  }
  if (group.find("momentum") || (!group.find("betas") && group.find("params")))
    fail(where, "is of another optimizer than Adam, which alone is read", kWeightsAlone);
}

std::vector<OptimizerGroup> OptimizerValues::groups(const PickleValue& inner) {
  const PickleValue* groups = inner.find("param_groups");
  if (!groups || !groups->is(Kind::list)) fail("optimizer.param_groups", "is missing or no list");
  std::vector<OptimizerGroup> out;
  for (std::size_t i = 0; i < groups->items.size(); ++i) {
    const PickleValue& each = *groups->items[i];
    const std::string where = detail::concat("optimizer.param_groups[", i, "]");
    const PickleValue* params = each.find("params");
    if (params && params->is(Kind::list) && params->items.empty()) continue;
    check_group(each, where);
    count(each.find("step"), where + ".step");
    const PickleValue* factor = each.find("wd_mult");
    const double decay = factor ? number(factor, 1) : i == 0 ? 1 : 0;
    if (decay != 0 && decay != 1)
      fail(where, detail::concat("wd_mult is ", decay, "; 0 and 1 are read"), kWeightsAlone);
    for (const OptimizerGroup& other : out) {
      if (params && other.decays == (decay == 1))
        fail(where, "is a second group of the same weight decay, which is not read", kWeightsAlone);
    }
    out.push_back({decay == 1, params});
  }
  return out;
}

std::optional<ScalerFacts> OptimizerValues::scaler(const PickleValue* value) const {
  if (!value || !value->is(Kind::dict) || !value->find("scale")) return std::nullopt;
  const auto scale = scalar(value->find("scale"));
  if (!scale || !(*scale > 0) || *scale > 1e38) fail("optimizer.grad_scaler.scale", "is no factor of a loss");
  const auto tracker = [&](const char* name, double absent) {
    const double steps = scalar(value->find(name)).value_or(absent);
    if (!(steps >= 0) || steps > INT32_MAX)
      fail(detail::concat("optimizer.grad_scaler.", name), detail::concat(steps, " is no number of steps"));
    return static_cast<std::int64_t>(steps);
  };
  return ScalerFacts{*scale, tracker("growth_tracker", 0), tracker("hysteresis_tracker", 2)};
}

}  // namespace tessera::checkpoint_detail
