#pragma once
/// Asking the other ranks of a group, over the host, what they have called.

#include <string>
#include <vector>

#include "comm/nccl/task.hpp"
#include "tessera/comm/communicator.hpp"

namespace tessera {

/// Every rank's text. Collective over the ranks of `group`, blocks.
std::vector<std::string> nccl_gather_texts(Communicator& group, const std::string& own);

/// How long ranks wait for each other's answers: their deadlines need not pass at the same moment.
double nccl_ask_timeout_s(double timeout_s);

/// Why an operation did not end in time. Whoever is not stuck in an operation itself does not answer, and is
/// named. `probe`: a group for this question, with nccl_ask_timeout_s as its deadline.
std::string nccl_explain(Communicator& probe, const std::vector<int>& names, const NcclTask& task,
                         double timeout_s);

}  // namespace tessera
