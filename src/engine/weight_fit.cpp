#include "tessera/engine/weight_fit.hpp"

#include <algorithm>
#include <cctype>

namespace tessera {
namespace {

/// Where a tensor is in its model.
struct Place {
  std::string parameter;
  Shape shape;
  std::int64_t row = 0, rows = 0;
};

std::int64_t rows_of(const HfPart& part) { return part.shape[part.transposed ? 1 : 0]; }

std::map<std::string, Place> places_of(const std::vector<HfMapping>& mappings) {
  std::map<std::string, Place> places;
  for (const HfMapping& mapping : mappings) {
    std::int64_t row = 0;
    for (const HfPart& part : mapping.parts) {
      places[part.name] = {mapping.name, part.shape, row, rows_of(part)};
      row += rows_of(part);
    }
  }
  return places;
}

/// "h.12.attn" as "h.*.attn".
std::string without_number(const std::string& name) {
  std::string out;
  for (std::size_t i = 0; i < name.size(); ++i) {
    const bool digit = std::isdigit(static_cast<unsigned char>(name[i])) != 0;
    const bool begins = digit && i > 0 && name[i - 1] == '.';
    if (begins) {
      while (i + 1 < name.size() && std::isdigit(static_cast<unsigned char>(name[i + 1]))) ++i;
      out += '*';
    } else {
      out += name[i];
    }
  }
  return out;
}

std::string listed(const std::vector<std::string>& names) {
  std::vector<std::string> kinds;
  for (const std::string& name : names) {
    const std::string kind = without_number(name);
    if (std::find(kinds.begin(), kinds.end(), kind) == kinds.end()) kinds.push_back(kind);
  }
  std::string text;
  for (const std::string& kind : kinds) text += (text.empty() ? "" : ", ") + kind;
  return text;
}

}  // namespace

std::string WeightFit::text() const {
  std::string out;
  if (!drawn.empty()) out += "drawn anew from the seed: " + listed(drawn) + "; ";
  if (!dropped.empty()) out += "left out: " + listed(dropped) + "; ";
  return out + detail::concat(kept_tensors, kept_tensors == 1 ? " tensor keeps its" : " tensors keep their",
                              " weights");
}

WeightFit weight_fit(const Architecture& from, Architecture to) {
  to.type = from.type;
  const std::vector<HfMapping> old = hf_mappings(from), now = hf_mappings(to);
  std::map<std::string, Place> there = places_of(old);
  WeightFit fit;
  for (const HfMapping& mapping : now) {
    std::int64_t row = 0;
    for (const HfPart& part : mapping.parts) {
      const auto found = there.find(part.name);
      if (found != there.end() && found->second.shape == part.shape) {
        fit.kept[mapping.name].push_back({part.name, row, found->second.row, found->second.rows});
        ++fit.kept_tensors;
      } else {
        fit.drawn.push_back(part.name);
      }
      if (found != there.end()) there.erase(found);
      row += rows_of(part);
    }
  }
  for (const HfMapping& mapping : old) {
    for (const HfPart& part : mapping.parts) {
      if (there.contains(part.name)) fit.dropped.push_back(part.name);
    }
  }
  return fit;
}

void read_rows(const HfModel& from, const KeptRows& rows, const StatePiece& piece, const ExecCtx& ctx) {
  std::vector<float> values;
  for (const auto& [place, state] : piece.boxes()) {
    const TensorSlice box{place.global, place.shape};
    const std::int64_t begin = std::max(box.offset[0], rows.here),
                       end = std::min(box.offset[0] + box.shape[0], rows.here + rows.count);
    if (begin >= end) continue;
    TensorSlice wanted = box;
    wanted.offset[0] = begin - rows.here + rows.there;
    wanted.shape[0] = end - begin;
    values.resize(static_cast<std::size_t>(wanted.shape.numel()));
    from.read_f32(piece.parameter->name(), wanted, values);
    const std::int64_t row = box.shape.numel() / box.shape[0];
    state.narrow((begin - box.offset[0]) * row, wanted.shape.numel()).write(ctx, values.data());
  }
}

}  // namespace tessera
