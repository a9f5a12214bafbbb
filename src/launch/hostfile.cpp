#include "launch/hostfile.hpp"

#include <arpa/inet.h>
#include <netdb.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <numeric>
#include <sstream>

#include "comm/resolve.hpp"
#include "launch/environment.hpp"
#include "launch/file_values.hpp"
#include "launch/words.hpp"
#include "tessera/base/error.hpp"

namespace tessera::launching {
namespace {

constexpr int kMostSlots = 4096;

std::vector<std::string> words_of(std::string_view line) {
  std::istringstream stream{std::string(line)};
  std::vector<std::string> words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

/// What ssh would take for a flag, and what the filters give a meaning to, is no name.
bool is_name(const std::string& name) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '-' || c == '_';
  };
  return !name.empty() && name.front() != '-' && std::all_of(name.begin(), name.end(), allowed);
}

/// What is wrong with a line; empty if nothing.
std::string read_line(const std::vector<std::string>& words, std::vector<Host>& hosts) {
  constexpr std::string_view kSlots = "slots=";
  int count = 0;
  if (words.size() != 2 || !words[1].starts_with(kSlots) || !parses(words[1].substr(kSlots.size()), count)) {
    return "must be NAME slots=N";
  }
  if (!is_name(words[0])) {
    return detail::concat("'", words[0],
                          "' is no name of a machine (letters, digits, '.', '-', '_'; a user's name goes "
                          "into ssh's configuration)");
  }
  if (count < 1 || count > kMostSlots)
    return detail::concat("slots must be from 1 to ", kMostSlots, ", not ", count);
  if (std::any_of(hosts.begin(), hosts.end(), [&](const Host& host) { return host.name == words[0]; })) {
    return detail::concat("'", words[0], "' stands there twice");
  }
  hosts.push_back({words[0], std::vector<int>(static_cast<std::size_t>(count))});
  std::iota(hosts.back().slots.begin(), hosts.back().slots.end(), 0);
  return {};
}

/// One "NAME[:SLOT,SLOT...]" of a filter.
struct Named {
  std::size_t host = 0;
  std::vector<int> slots;  ///< empty = all
};

Named read_named(const std::string& text, const char* flag, const std::vector<Host>& hosts) {
  const auto colon = text.find(':');
  const std::string name = text.substr(0, colon);
  const auto host = std::find_if(hosts.begin(), hosts.end(), [&](const Host& h) { return h.name == name; });
  TESSERA_ENSURE(ConfigError, host != hosts.end(), flag, " names '", name, "', which is not in the hostfile");
  Named named{static_cast<std::size_t>(host - hosts.begin()), {}};
  if (colon == std::string::npos) return named;
  for (const std::string& word : split(text.substr(colon + 1), ',')) {
    int slot = 0;
    const bool known = parses(word, slot) && slot >= 0 && static_cast<std::size_t>(slot) < host->slots.size();
    TESSERA_ENSURE(ConfigError, known, flag, " names slot '", word, "' of ", name,
                   ", which has the slots 0 to ", host->slots.size() - 1);
    named.slots.push_back(slot);
  }
  return named;
}

void keep_slots(Host& host, const std::vector<bool>& kept) {
  std::erase_if(host.slots, [&](int slot) { return !kept[static_cast<std::size_t>(slot)]; });
}

bool is_loopback(const sockaddr& address) {
  // The bytes of both kinds are in the order of the network.
  if (address.sa_family == AF_INET) {
    return (ntohl(reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr) >> 24) == IN_LOOPBACKNET;
  }
  return address.sa_family == AF_INET6 &&
         IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
}

/// The address behind a name, as number: other machines may know the name as another one, Debian's own name
/// is one of the loopback's.
std::string address_of(const std::string& name) {
  constexpr std::chrono::seconds kPatience{10};
  const std::string hint = "give --main_process_ip, an address of the first machine that all can reach";
  std::string reason;
  const store::Addresses found =
      store::resolve(name, "0", std::chrono::steady_clock::now() + kPatience, reason);
  TESSERA_ENSURE(ConfigError, found, name, ": ", reason, ": ", hint);
  for (const addrinfo* entry = found.get(); entry != nullptr; entry = entry->ai_next) {
    std::array<char, NI_MAXHOST> text{};
    if (!is_loopback(*entry->ai_addr) && ::getnameinfo(entry->ai_addr, entry->ai_addrlen, text.data(),
                                                       text.size(), nullptr, 0, NI_NUMERICHOST) == 0) {
      return text.data();
    }
  }
  throw ConfigError(
      detail::concat(name, " is this machine's own name for itself (a loopback address): ", hint));
}

/// The processes of each machine.
std::int64_t share_of(const LaunchSettings& settings, const std::vector<Host>& hosts) {
  const auto by_slots = [](const Host& a, const Host& b) { return a.slots.size() < b.slots.size(); };
  const auto [least, most] = std::minmax_element(hosts.begin(), hosts.end(), by_slots);
  const auto machines = static_cast<std::int64_t>(hosts.size());
  const auto room = static_cast<std::int64_t>(least->slots.size());
  if (!settings.num_processes) {
    TESSERA_ENSURE(ConfigError, least->slots.size() == most->slots.size(), least->name, " has ",
                   least->slots.size(), " slots and ", most->name, " ", most->slots.size(),
                   ": every machine runs as many processes. Give --num_processes, at most ", room * machines,
                   ", or leave machines or slots out with --exclude");
    return room;
  }
  const std::int64_t processes = *settings.num_processes;
  TESSERA_ENSURE(ConfigError, processes > 0 && processes % machines == 0, "num_processes ", processes,
                 " must be a multiple of the ", machines, " machines of the hostfile");
  TESSERA_ENSURE(ConfigError, processes / machines <= room, "num_processes ", processes, " are ",
                 processes / machines, " on each of ", machines, " machines, and ", least->name, " has ",
                 room, " slots");
  return processes / machines;
}

}  // namespace

std::vector<Host> parse_hostfile(std::string_view text, const std::string& name) {
  std::vector<Host> hosts;
  std::string faults;
  std::istringstream lines{std::string(text)};
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    const auto words = words_of(std::string_view(line).substr(0, line.find('#')));
    const std::string fault = words.empty() ? "" : read_line(words, hosts);
    if (!fault.empty()) faults += detail::concat(faults.empty() ? "" : "\n", name, ":", number, ": ", fault);
  }
  if (!faults.empty()) throw ConfigError(faults);
  TESSERA_ENSURE(ConfigError, !hosts.empty(), name, ": names no machine; a line for each: NAME slots=N");
  return hosts;
}

std::vector<Host> pick_hosts(std::vector<Host> hosts, const std::string& include,
                             const std::string& exclude) {
  TESSERA_ENSURE(ConfigError, include.empty() || exclude.empty(), "give include or exclude, not both");
  if (include.empty() && exclude.empty()) return hosts;
  const bool only = !include.empty();
  std::vector<std::vector<bool>> kept;
  for (const Host& host : hosts) kept.emplace_back(host.slots.size(), !only);
  for (const std::string& text : split(only ? include : exclude, '@')) {
    const Named named = read_named(text, only ? "include" : "exclude", hosts);
    std::vector<bool>& mine = kept[named.host];
    if (named.slots.empty()) mine.assign(mine.size(), only);
    for (const int slot : named.slots) mine[static_cast<std::size_t>(slot)] = only;
  }
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    const std::size_t before = hosts[i].slots.size();
    keep_slots(hosts[i], kept[i]);
    hosts[i].picked = hosts[i].slots.size() < before;
  }
  std::erase_if(hosts, [](const Host& host) { return host.slots.empty(); });
  TESSERA_ENSURE(ConfigError, !hosts.empty(), "exclude leaves no machine of the hostfile");
  return hosts;
}

std::optional<std::string> visible_gpus(const Host& host) {
  if (!host.picked) return std::nullopt;
  std::string gpus;
  for (const int slot : host.slots) gpus += detail::concat(gpus.empty() ? "" : ",", slot);
  return gpus;
}

std::vector<Host> resolve_hosts(LaunchSettings& settings) {
  const std::string path = *settings.hostfile;
  const std::int64_t port = settings.ssh_port.value_or(22);
  TESSERA_ENSURE(ConfigError, port >= 1 && port <= 65535, "ssh_port must be from 1 to 65535, not ", port);
  std::vector<Host> hosts = pick_hosts(parse_hostfile(read_text(path), path), settings.include.value_or(""),
                                       settings.exclude.value_or(""));
  const auto there = static_cast<std::int64_t>(hosts.size());
  const std::int64_t machines = settings.num_machines.value_or(there);
  TESSERA_ENSURE(ConfigError, machines >= 1 && machines <= there, "num_machines must be from 1 to the ",
                 there, " of ", path, ", not ", machines);
  hosts.resize(static_cast<std::size_t>(machines));
  const std::int64_t share = share_of(settings, hosts);
  for (Host& host : hosts) host.slots.resize(static_cast<std::size_t>(share));
  settings.num_machines = machines;
  settings.num_processes = machines * share;
  if (machines > 1 && !settings.main_process_ip) settings.main_process_ip = address_of(hosts.front().name);
  const std::int64_t rank = settings.machine_rank.value_or(-1);
  if (rank >= 0 && rank < machines) {
    const auto gpus = visible_gpus(hosts[static_cast<std::size_t>(rank)]);
    if (gpus) set_variable(settings.environment, "CUDA_VISIBLE_DEVICES", *gpus);
  }
  settings.hostfile = settings.include = settings.exclude = std::nullopt;
  return hosts;
}

}  // namespace tessera::launching
