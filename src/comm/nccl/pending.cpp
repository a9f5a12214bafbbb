#include "comm/nccl/pending.hpp"

#include <algorithm>

#include "tessera/base/error.hpp"

namespace tessera {

std::string NcclAnnouncement::describe() const {
  return detail::concat("tag ", tag, ", ", bytes, " bytes of ", static_cast<DType>(dtype), " at ",
                        where.data());
}

void NcclPending::wait(const ExecCtx& ctx) {
  if (job_->failed()) job_->check(text_ + " was waiting");
  check_messages();
  for (const Part& part : parts_) part.lane->await_launch(*part.task);
  for (const Part& part : parts_) part.task->order(*ctx.stream);
  if (job_->failed()) job_->check(text_ + " was waiting");
}

bool NcclPending::done() const {
  return job_->failed() ||
         std::all_of(parts_.begin(), parts_.end(), [](const Part& part) { return part.task->done(); });
}

/// The order in which two ranks name their messages is the only thing that brings them together.
void NcclPending::check_messages() {
  const std::lock_guard lock(mutex_);
  if (expected_.empty() && announced_.empty()) return;
  const ExecCtx ctx = ExecCtx::cpu(1);
  for (const Expected& expected : expected_) {
    NcclAnnouncement theirs;
    const Tensor text = Tensor::wrap(&theirs, {static_cast<std::int64_t>(sizeof theirs)}, DType::u8);
    control_->recv(ctx, text, expected.peer, nccl_announcement_tag(expected.number)).wait(ctx);
    const NcclAnnouncement& own = expected.own;
    if (theirs.tag == own.tag && theirs.bytes == own.bytes && theirs.dtype == own.dtype) continue;
    const std::string mismatch =
        detail::concat(text_, ": this receives, as message ", expected.number, " from rank ",
                       expected.peer_name, ", ", own.describe(), "; what that rank sends as such has ",
                       theirs.describe(), ". Over NCCL receives are posted in the order of the sender");
    job_->fail(mismatch);
    throw CommunicationError(mismatch);
  }
  expected_.clear();
  announced_.clear();
}

}  // namespace tessera
