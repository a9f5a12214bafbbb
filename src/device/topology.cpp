#include "tessera/device/topology.hpp"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>

#include "tessera/base/error.hpp"

namespace tessera {
namespace {

constexpr std::pair<std::string_view, LinkKind> kNames[] = {
    {"X", LinkKind::self},          {"PIX", LinkKind::pcie_switch}, {"PXB", LinkKind::pcie_switches},
    {"PHB", LinkKind::host_bridge}, {"NODE", LinkKind::numa_node},  {"SYS", LinkKind::system},
};

std::optional<int> number_in(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) return std::nullopt;
  return value;
}

std::optional<GpuLink> link_named(std::string_view text) {
  for (const auto& [name, kind] : kNames) {
    if (text == name) return GpuLink{kind};
  }
  if (!text.starts_with("NV")) return std::nullopt;
  const std::optional<int> count = number_in(text.substr(2));
  if (!count || *count < 1) return std::nullopt;
  return GpuLink{LinkKind::nvlink, *count};
}

/// Without the codes that underline the heading on a terminal.
std::string without_escapes(std::string_view line) {
  std::string plain;
  for (std::size_t i = 0; i < line.size(); ++i) {
    if (line[i] == '\033') {
      i = std::min(line.find('m', i), line.size());
    } else if (line[i] != '\r') {
      plain += line[i];
    }
  }
  return plain;
}

std::vector<std::string> words_of(const std::string& line) {
  std::istringstream in(line);
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

std::vector<std::string> cells_of(const std::string& line) {
  std::istringstream in(line);
  std::vector<std::string> cells;
  for (std::string cell; std::getline(in, cell, '\t');) {
    cell.erase(0, std::min(cell.find_first_not_of(' '), cell.size()));
    cell.erase(cell.find_last_not_of(' ') + 1);
    cells.push_back(cell);
  }
  return cells;
}

/// One pass over the lines of a table.
class Reader {
 public:
  explicit Reader(const std::string& source) : source_(source) {}

  void take(const std::string& line) {
    ++line_;
    const std::vector<std::string> words = words_of(line);
    if (words.empty() || !words[0].starts_with("GPU") || rows_ == count() + 1) return;
    if (rows_ == 0) {
      heading(line, words);
    } else {
      row(line, words);
    }
    ++rows_;
  }

  Topology finish() {
    ensure(rows_ > 0, "there is no table of GPUs: give what `nvidia-smi topo -m` prints");
    ensure(rows_ == count() + 1, "the table has ", rows_ - 1, " rows for ", count(), " GPUs");
    for (std::size_t a = 0; a < count(); ++a) {
      for (std::size_t b = 0; b < count(); ++b)
        ensure(topology_.between(a, b) == topology_.between(b, a), "GPU", a, " and GPU", b,
               " are connected in two ways, ", to_text(topology_.between(a, b)), " and ",
               to_text(topology_.between(b, a)));
    }
    return std::move(topology_);
  }

 private:
  std::size_t count() const { return topology_.gpus.size(); }

  template <typename... Parts>
  void ensure(bool condition, const Parts&... parts) const {
    TESSERA_ENSURE(DataError, condition, source_, ":", line_, ": ", parts...);
  }

  void heading(const std::string& line, const std::vector<std::string>& words) {
    std::size_t gpus = 0;
    while (gpus < words.size() && words[gpus] == detail::concat("GPU", gpus)) ++gpus;
    ensure(gpus > 0 && (gpus == words.size() || words[gpus] != "X"),
           "the heading must name the columns GPU0, GPU1, ...");
    topology_.gpus.resize(gpus);
    const std::vector<std::string> cells = cells_of(line);
    const auto numa = std::find(cells.begin(), cells.end(), "NUMA Affinity");
    if (numa != cells.end()) numa_ = static_cast<std::size_t>(numa - cells.begin());
  }

  void row(const std::string& line, const std::vector<std::string>& words) {
    const std::size_t gpu = rows_ - 1;
    ensure(words[0] == detail::concat("GPU", gpu), "the row of GPU", gpu, " should be here, not that of ",
           words[0]);
    ensure(words.size() > count(), "the row of ", words[0], " has ", words.size() - 1, " entries for ",
           count(), " GPUs");
    for (std::size_t i = 0; i < count(); ++i) {
      const std::optional<GpuLink> link = link_named(words[i + 1]);
      ensure(link.has_value(), "\"", words[i + 1],
             "\" is no connection: X, NV#, PIX, PXB, PHB, NODE, SYS are");
      ensure((link->kind == LinkKind::self) == (i == gpu), words[0], " to GPU", i, " cannot be ",
             words[i + 1]);
      topology_.links.push_back(*link);
    }
    const std::vector<std::string> cells = cells_of(line);
    if (numa_ && *numa_ < cells.size()) topology_.gpus[gpu].numa_node = number_in(cells[*numa_]).value_or(-1);
  }

  const std::string& source_;
  Topology topology_;
  std::size_t line_ = 0, rows_ = 0;
  std::optional<std::size_t> numa_;  // the column
};

}  // namespace

std::string to_text(const GpuLink& link) {
  if (link.kind == LinkKind::nvlink) return detail::concat("NV", link.nvlinks);
  for (const auto& [name, kind] : kNames) {
    if (kind == link.kind) return std::string(name);
  }
  return "?";
}

std::vector<std::vector<int>> nvlink_islands(const Topology& topology) {
  const std::size_t count = topology.gpus.size();
  std::vector<int> island(count, -1);
  std::vector<std::vector<int>> islands;
  for (std::size_t first = 0; first < count; ++first) {
    if (island[first] >= 0) continue;
    std::vector<std::size_t> reached = {first};
    island[first] = static_cast<int>(islands.size());
    for (std::size_t i = 0; i < reached.size(); ++i) {
      for (std::size_t other = 0; other < count; ++other) {
        if (island[other] >= 0 || topology.between(reached[i], other).kind != LinkKind::nvlink) continue;
        island[other] = island[first];
        reached.push_back(other);
      }
    }
    std::sort(reached.begin(), reached.end());
    islands.emplace_back(reached.begin(), reached.end());
  }
  return islands;
}

std::string to_text(const Topology& topology) {
  std::string text;
  const std::size_t count = topology.gpus.size();
  for (std::size_t i = 0; i < count; ++i) text += detail::concat("\tGPU", i);
  text += "\tNUMA Affinity\n";
  for (std::size_t a = 0; a < count; ++a) {
    text += detail::concat("GPU", a);
    for (std::size_t b = 0; b < count; ++b) text += detail::concat("\t", to_text(topology.between(a, b)));
    const int node = topology.gpus[a].numa_node;
    text += detail::concat("\t", node < 0 ? "N/A" : std::to_string(node), "\n");
  }
  return text;
}

Topology parse_topology(std::string_view text, const std::string& source) {
  Reader reader(source);
  std::istringstream lines{std::string(text)};
  for (std::string line; std::getline(lines, line);) reader.take(without_escapes(line));
  return reader.finish();
}

std::vector<NumaNode> numa_nodes(const std::filesystem::path& system) {
  std::map<int, NumaNode> nodes;
  std::error_code error;
  std::filesystem::directory_iterator it(system / "devices/system/node", error);
  for (; !error && it != std::filesystem::directory_iterator(); it.increment(error)) {
    const std::string name = it->path().filename().string();
    const std::optional<int> number = name.starts_with("node") ? number_in(name.substr(4)) : std::nullopt;
    if (!number) continue;
    std::ifstream file(it->path() / "cpulist");
    std::string cpus;
    std::getline(file, cpus);
    nodes[*number] = {*number, cpus};
  }
  std::vector<NumaNode> list;
  for (auto& [number, node] : nodes) list.push_back(std::move(node));
  return list;
}

}  // namespace tessera
