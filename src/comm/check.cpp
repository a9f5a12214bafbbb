#include "comm/check.hpp"

#include <sstream>
#include <string_view>

namespace tessera {
namespace {

std::string join(const std::vector<std::int64_t>& counts) {
  std::ostringstream text;
  for (std::size_t i = 0; i < counts.size(); ++i) text << (i ? " " : "") << counts[i];
  return text.str();
}

bool agree(const CallSignature& a, const CallSignature& b, int rank_a, int rank_b) {
  if (a.operation != b.operation || a.dtype != b.dtype || a.count != b.count || a.reduction != b.reduction ||
      a.root != b.root) {
    return false;
  }
  if (a.operation != "all_to_all") return a.send_counts == b.send_counts && a.recv_counts == b.recv_counts;
  const auto i = static_cast<std::size_t>(rank_a), j = static_cast<std::size_t>(rank_b);
  return a.send_counts[j] == b.recv_counts[i] && b.send_counts[i] == a.recv_counts[j];
}

void write(std::ostream& out, const std::vector<std::int64_t>& counts) {
  out << ' ' << counts.size();
  for (const std::int64_t count : counts) out << ' ' << count;
}

void read(std::istream& in, std::vector<std::int64_t>& counts) {
  std::size_t size = 0;
  in >> size;
  for (std::size_t i = 0; i < size && in; ++i) {
    std::int64_t count = 0;
    in >> count;
    counts.push_back(count);
  }
}

}  // namespace

std::string CallSignature::encode() const {
  const auto word = [](const std::string& text) { return text.empty() ? std::string("-") : text; };
  std::ostringstream out;
  out << word(operation) << ' ' << word(dtype) << ' ' << count << ' ' << word(reduction) << ' ' << root;
  write(out, send_counts);
  write(out, recv_counts);
  out << ' ' << word(where);  // last: a file name may contain spaces
  return out.str();
}

CallSignature CallSignature::decode(const std::string& text) {
  CallSignature call;
  std::istringstream in(text);
  in >> call.operation >> call.dtype >> call.count >> call.reduction >> call.root;
  read(in, call.send_counts);
  read(in, call.recv_counts);
  in.ignore(1);
  std::getline(in, call.where);
  TESSERA_ENSURE(CommunicationError, !in.fail(), "another rank sent \"", text.substr(0, 200),
                 "\" where a description of its call was expected");
  for (std::string* field : {&call.operation, &call.dtype, &call.reduction, &call.where}) {
    if (*field == "-") field->clear();
  }
  return call;
}

std::string CallSignature::describe() const {
  std::ostringstream text;
  text << operation;
  if (!dtype.empty()) text << " of ";
  if (!dtype.empty() && send_counts.empty()) text << count << " ";
  text << dtype;
  if (!reduction.empty()) text << ", " << reduction;
  if (root >= 0) text << ", root " << root;
  if (operation == "all_to_all") {
    text << ", sending " << join(send_counts) << ", receiving " << join(recv_counts);
  } else if (!send_counts.empty()) {
    text << ", blocks " << join(send_counts);
  }
  text << " at " << where;
  return text.str();
}

std::string place_of(const Communicator::Where& where) {
  const std::string_view path = where.file_name();
  const auto slash = path.rfind('/');
  return std::string(slash == std::string_view::npos ? path : path.substr(slash + 1)) + ":" +
         std::to_string(where.line());
}

std::string find_mismatch(std::span<const CallSignature> calls, std::span<const int> names,
                          const std::string& group, std::uint64_t sequence) {
  const int size = static_cast<int>(calls.size());
  for (int i = 0; i < size; ++i) {
    for (int j = i + 1; j < size; ++j) {
      const CallSignature &a = calls[static_cast<std::size_t>(i)], &b = calls[static_cast<std::size_t>(j)];
      if (agree(a, b, i, j)) continue;
      return detail::concat("ranks of group ", group, " called different things as operation ", sequence,
                            ": rank ", names[static_cast<std::size_t>(i)], " ", a.describe(), "; rank ",
                            names[static_cast<std::size_t>(j)], " ", b.describe());
    }
    // Only in an all_to_all can two later ranks disagree while both agree with the first.
    if (calls[0].operation != "all_to_all") break;
  }
  return {};
}

}  // namespace tessera
