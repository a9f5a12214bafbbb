#include "comm/nccl/ask.hpp"

#include <algorithm>
#include <sstream>

#include "tessera/base/error.hpp"

namespace tessera {

std::vector<std::string> nccl_gather_texts(Communicator& group, const std::string& own) {
  const ExecCtx ctx = ExecCtx::cpu(1);
  std::vector<std::int64_t> lengths(static_cast<std::size_t>(group.size()));
  lengths[static_cast<std::size_t>(group.rank())] = static_cast<std::int64_t>(own.size());
  const Tensor all_lengths = Tensor::wrap(lengths.data(), {group.size()}, DType::i64);
  group.all_gather(ctx, all_lengths.narrow(0, group.rank(), 1), all_lengths).wait(ctx);

  std::int64_t total = 0, before = 0;
  for (int r = 0; r < group.size(); ++r) {
    if (r == group.rank()) before = total;
    total += lengths[static_cast<std::size_t>(r)];
  }
  std::string text(static_cast<std::size_t>(total), ' ');
  own.copy(text.data() + before, own.size());
  const Tensor whole = Tensor::wrap(text.data(), {total}, DType::u8);
  const Tensor part = whole.narrow(0, before, static_cast<std::int64_t>(own.size()));
  group.all_gather(ctx, part, whole, lengths).wait(ctx);
  std::vector<std::string> texts;
  for (std::size_t begin = 0; const std::int64_t length : lengths) {
    texts.push_back(text.substr(begin, static_cast<std::size_t>(length)));
    begin += static_cast<std::size_t>(length);
  }
  return texts;
}

double nccl_ask_timeout_s(double timeout_s) { return std::clamp(timeout_s / 10, 1.0, 20.0); }

std::string nccl_explain(Communicator& probe, const std::vector<int>& names, const NcclTask& task,
                         double timeout_s) {
  const std::string head = detail::concat(task.text(), " did not end within ", timeout_s, " s");
  try {
    std::vector<CallSignature> calls;
    std::string places;
    bool same = true;
    for (const std::string& text :
         nccl_gather_texts(probe, detail::concat(task.sequence, " ", task.what->call.encode()))) {
      std::istringstream in(text);
      std::uint64_t sequence = 0;
      in >> sequence;
      in.ignore(1);
      std::string rest;
      std::getline(in, rest);
      const int name = names[calls.size()];
      calls.push_back(CallSignature::decode(rest));
      same = same && sequence == task.sequence;
      places += detail::concat(places.empty() ? "" : "; ", "rank ", name, " is in operation ", sequence, ", ",
                               calls.back().describe());
    }
    if (!same) return detail::concat(head, ": ", places);
    const std::string mismatch = find_mismatch(calls, names, probe.name(), task.sequence);
    if (!mismatch.empty()) return detail::concat(head, ": ", mismatch);
    return detail::concat(
        head, ", though every rank has called it: a GPU or a connection does not answer",
        task.in_graph ? ", or all that the graph does takes longer (device.cuda_graph)" : "");
  } catch (const CommunicationError& error) {
    return detail::concat(head, "; asked what they wait for: ", error.what());
  }
}

}  // namespace tessera
