/// The dump of one rank, both ways.

#include <array>
#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/json_reason.hpp"
#include "engine/flight_dump.hpp"
#include "tessera/base/clock.hpp"
#include "tessera/base/error.hpp"
#include "tessera/engine/watchdog.hpp"

namespace tessera {
namespace {

using nlohmann::json;

constexpr const char* kFormat = "tessera flight 1";

// In the order of the enumerators.
constexpr std::array kKinds{"kernel", "communication", "call"};
constexpr std::array kStates{"queued", "running", "done"};

template <typename Enumerator>
const char* name_in(const std::array<const char*, 3>& names, Enumerator value) {
  return names[static_cast<std::size_t>(value)];
}

/// What is to be added to the seconds of now_s() for those since 1970.
double unix_offset() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count() - now_s();
}

json to_json(const FlightRecord& record, double offset_s) {
  const FlightOperation& what = record.what;
  const auto time = [&](double s) { return s == 0 ? json() : json(s + offset_s); };
  json shape = json::array();
  for (int i = 0; i < what.dims; ++i) shape.push_back(what.shape[static_cast<std::size_t>(i)]);
  json entry{{"number", record.number},
             {"kind", name_in(kKinds, what.kind)},
             {"name", what.name},
             {"shape", std::move(shape)},
             {"state", name_in(kStates, record.state)},
             {"queued", time(record.queued_s)},
             {"begin", time(record.begin_s)},
             {"end", time(record.end_s)}};
  if (what.kind != FlightOperation::Kind::communication) return entry;
  entry["dtype"] = what.dtype;
  entry["bytes"] = what.bytes;
  entry["group"] = what.group;
  entry["sequence"] = what.sequence;
  entry["waited"] = record.waited;
  if (what.peer >= 0) entry["peer"] = what.peer;
  return entry;
}

FlightDump::Operation operation_from(const json& entry, const std::vector<FlightDump::Group>& groups) {
  FlightDump::Operation operation;
  operation.name = entry.at("name").get<std::string>();
  operation.state = entry.at("state").get<std::string>();
  operation.communicates = entry.at("kind").get<std::string>() == "communication";
  for (const json& size : entry.at("shape")) operation.shape.push_back(whole_number<std::int64_t>(size));
  operation.queued = entry.at("queued").get<double>();
  if (entry.at("end").is_number()) operation.end = entry.at("end").get<double>();
  if (!operation.communicates) return operation;
  operation.dtype = entry.at("dtype").get<std::string>();
  operation.sequence = whole_number<std::uint64_t>(entry.at("sequence"));
  operation.waited = entry.at("waited").get<bool>();
  operation.group = whole_number<std::size_t>(entry.at("group"));
  operation.peer = whole_number_or(entry, "peer", -1);
  TESSERA_ENSURE(DataError, operation.group < groups.size(), "operation ", operation.name, " names group ",
                 operation.group, " of ", groups.size());
  TESSERA_ENSURE(DataError, operation.peer >= -1, "peer ", operation.peer);
  return operation;
}

FlightDump dump_from(const json& root) {
  TESSERA_ENSURE(DataError, root.at("format").get<std::string>() == kFormat, "its format is not \"", kFormat,
                 "\"");
  FlightDump dump;
  dump.rank = whole_number<int>(root.at("rank"));
  dump.world_size = whole_number<int>(root.at("world_size"));
  dump.why = root.at("why").get<std::string>();
  dump.taken = root.at("taken").get<double>();
  if (root.at("call").is_object()) {
    dump.call = root.at("call").at("name").get<std::string>();
    dump.call_begin = root.at("call").at("begin").get<double>();
  }
  for (const json& group : root.at("groups")) {
    dump.groups.push_back({group.at("name").get<std::string>(), {}, whole_number<int>(group.at("instance"))});
    for (const json& rank : group.at("ranks")) dump.groups.back().ranks.push_back(whole_number<int>(rank));
  }
  for (const json& entry : root.at("operations"))
    dump.operations.push_back(operation_from(entry, dump.groups));
  TESSERA_ENSURE(DataError, dump.world_size > 0 && dump.rank >= 0 && dump.rank < dump.world_size, "rank ",
                 dump.rank, " of ", dump.world_size);
  return dump;
}

}  // namespace

std::string flight_json(const FlightSnapshot& flight, int rank, int world_size, const std::string& why) {
  const double offset_s = unix_offset();
  json groups = json::array(), operations = json::array();
  for (const FlightGroup& group : flight.groups)
    groups.push_back({{"name", group.name}, {"ranks", group.ranks}, {"instance", group.instance}});
  for (const FlightRecord& record : flight.records) operations.push_back(to_json(record, offset_s));
  json call;
  if (!flight.call.empty()) call = {{"name", flight.call}, {"begin", flight.call_s + offset_s}};
  const json head{{"format", kFormat}, {"rank", rank}, {"world_size", world_size},
                  {"why", why},        {"call", call}, {"taken", flight.taken_s + offset_s},
                  {"groups", groups}};
  // An operation a line: people read these too.
  std::string text = head.dump(-1, ' ', false, json::error_handler_t::replace);
  text.back() = ',';
  text += "\"operations\":[";
  for (std::size_t i = 0; i < operations.size(); ++i) text += (i > 0 ? ",\n" : "\n") + operations[i].dump();
  return text + "\n]}\n";
}

FlightDump read_flight(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  TESSERA_ENSURE(DataError, in.good(), file.string(), ": cannot be read");
  try {
    return dump_from(json::parse(text.str()));
  } catch (const json::exception& error) {
    throw DataError(detail::concat(file.string(), ": this dump is damaged: ", error.what()));
  } catch (const DataError& error) {
    throw DataError(detail::concat(file.string(), ": this is no dump of a rank: ", error.what()));
  }
}

}  // namespace tessera
