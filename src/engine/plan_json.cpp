#include <nlohmann/json.hpp>

#include "tessera/engine/plan.hpp"

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

Json layers_json(const ModelPiece& piece) {
  return {{"first", piece.first_layer},
          {"count", piece.num_layers},
          {"embedding", piece.embedding},
          {"head", piece.head}};
}

Json rank_json(const RankPlan& rank) {
  Json pieces = Json::array(), memory = Json::object(), traffic = Json::array(), sent = Json::object();
  for (const ModelPiece& piece : rank.pieces) pieces.push_back(layers_json(piece));
  for (const MemoryTerm& term : rank.memory) memory[std::string(term.name)] = term.bytes;
  for (const TrafficTerm& term : rank.traffic) {
    traffic.push_back({{"axis", term.axis}, {"name", term.name}, {"bytes", term.bytes}});
    sent[std::string(term.axis)] = rank.bytes_sent(term.axis);
  }
  return {{"rank", rank.rank},
          {"tensor", rank.at.tp},
          {"data", rank.at.dp},
          {"stage", rank.at.pp},
          {"pieces", pieces},
          {"parameters", rank.parameters},
          {"most_in_flight", rank.most_in_flight},
          {"memory", memory},
          {"memory_bytes", rank.memory_bytes()},
          {"persistent_bytes", rank.persistent_bytes()},
          {"host_bytes", rank.elsewhere.host_bytes},
          {"disk_bytes", rank.elsewhere.disk_bytes},
          {"to_device_bytes", rank.elsewhere.to_device},
          {"to_host_bytes", rank.elsewhere.to_host},
          {"traffic", traffic},
          {"bytes_sent", sent}};
}

Json schedule_json(const Plan& plan) {
  const std::string text = to_text(plan.schedule);
  Json lines = Json::array();
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return {{"name", name_of(plan.schedule.kind)},
          {"chunks", plan.schedule.chunks},
          {"bubble", plan.bubble},
          {"even_bubble", plan.even_bubble},
          {"stages", lines}};
}

Json candidate_json(const RecomputeCandidate& candidate) {
  const RecomputeOptions& options = candidate.options;
  Json json = {{"recompute", name_of(options.what)}};
  if (options.what == Recompute::full)
    json.update({{"recompute_method", name_of(options.method)}, {"recompute_layers", options.layers}});
  json["memory_bytes"] = candidate.memory_bytes;
  return json;
}

Json recompute_json(const RecomputeChoice& choice) {
  Json tried = Json::array();
  for (const RecomputeCandidate& candidate : choice.tried) tried.push_back(candidate_json(candidate));
  return {{"chosen", candidate_json(choice.chosen)},
          {"fits", choice.fits()},
          {"limit_bytes", choice.limit.bytes},
          {"limit_source", choice.limit.source},
          {"tried", tried}};
}

Json advice_json(const Plan& plan, std::int64_t memory_bytes) {
  const std::optional<PlanAdvice> advice = advise(plan, memory_bytes);
  if (!advice) return nullptr;
  Json changes = Json::array();
  for (const ConfigItem& change : advice->changes) changes.push_back(change.key + "=" + change.value);
  return {{"changes", changes}, {"processes", advice->processes}, {"memory_bytes", advice->memory_bytes}};
}

}  // namespace

std::string to_json(const Plan& plan, std::optional<std::int64_t> memory_bytes) {
  Json json = {{"parameters", plan.parameters},
               {"processes", plan.mesh.world()},
               {"micro_batches", plan.micro_batches},
               {"layout",
                {{"tensor", plan.mesh.tp},
                 {"pipeline", plan.mesh.pp},
                 {"context", plan.mesh.cp},
                 {"expert", plan.mesh.ep},
                 {"data", plan.mesh.dp},
                 {"sequence", plan.config.parallel.sequence},
                 {"zero_stage", plan.config.parallel.zero_stage}}}};
  if (plan.recompute) json["recompute_auto"] = recompute_json(*plan.recompute);
  Json groups = Json::object(), ranks = Json::array();
  for (const RankGroups& axis : plan.groups) groups[std::string(axis.axis)] = axis.groups;
  for (const RankPlan& rank : plan.ranks) ranks.push_back(rank_json(rank));
  json["groups"] = groups;
  json["schedule"] = schedule_json(plan);
  json["ranks"] = ranks;
  if (memory_bytes) {
    const bool fits = plan.largest().memory_bytes() <= *memory_bytes;
    json["available_bytes"] = *memory_bytes;
    json["fits"] = fits;
    json["advice"] = fits ? Json(nullptr) : advice_json(plan, *memory_bytes);
  }
  return json.dump(2) + "\n";
}

}  // namespace tessera
