#include "tessera/engine/agreement.hpp"

#include <algorithm>
#include <array>
#include <exception>
#include <iterator>
#include <set>
#include <span>
#include <sstream>
#include <vector>

#include "tessera/base/hash.hpp"
#include "tessera/comm/bytes.hpp"
#include "tessera/comm/meeting.hpp"

namespace tessera {
namespace {

/// What a rank tells of its batch.
struct Notice {
  std::int64_t targets = 0, hash = 0, samples = 0, seq_length = 0, step = 0, frozen = 0;
  bool labels = false, absent = false, failed = false, sample_labels = false;
  std::int64_t sample_targets = 0;

  MeetingValues values() const {
    return {targets,
            hash,
            samples,
            seq_length,
            step,
            frozen,
            (labels ? 1 : 0) + (absent ? 2 : 0) + (failed ? 4 : 0) + (sample_labels ? 8 : 0) +
                16 * sample_targets};
  }
  static Notice from(const MeetingValues& v) {
    return {.targets = v[0],
            .hash = v[1],
            .samples = v[2],
            .seq_length = v[3],
            .step = v[4],
            .frozen = v[5],
            .labels = (v[6] & 1) != 0,
            .absent = (v[6] & 2) != 0,
            .failed = (v[6] & 4) != 0,
            .sample_labels = (v[6] & 8) != 0,
            .sample_targets = v[6] / 16};
  }
};

std::string text_of(const std::exception_ptr& failure) {
  if (!failure) return {};
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    return error.what();
  }
}

struct Field {
  const char* name;
  std::uint64_t hash;
};

constexpr std::size_t kFields = 11;
/// Everything of a batch that decides what a step computes.
std::array<Field, kFields> fields_of(const Batch& batch) {
  const auto of = [](const auto& values) { return content_hash(std::as_bytes(std::span(values))); };
  const std::array<std::int64_t, 3> shape{batch.batch, batch.seq_length, batch.encoder_seq_length};
  const std::array<std::int64_t, 4> numbers{batch.sample0, batch.sample_block, batch.sample_stride,
                                            batch.global_batch};
  const std::array<std::uint64_t, 2> keys{of(batch.key_begin), of(batch.key_end)};
  const std::array<std::uint64_t, 2> encoder_keys{of(batch.encoder_key_begin), of(batch.encoder_key_end)};
  return {{{"shape", of(shape)},
           {"tokens", of(batch.tokens)},
           {"labels", of(batch.labels)},
           {"position_ids", of(batch.position_ids)},
           {"attention_mask", of(keys)},
           {"document_ids", of(batch.document_ids)},
           {"token_types", of(batch.token_types)},
           {"sample_labels", of(batch.sample_labels)},
           {"encoder_tokens", of(batch.encoder_tokens)},
           {"encoder_attention_mask", of(encoder_keys)},
           {"sample numbers", of(numbers)}}};
}

Notice notice_of(const Batch& batch, const BatchCall& call) {
  if (call.failure) return {.failed = true};
  std::uint64_t hash = 0;
  for (const Field& field : fields_of(batch))
    hash = content_hash(std::as_bytes(std::span(&field.hash, 1)), hash);
  return {.targets = count_targets(batch),
          .hash = static_cast<std::int64_t>(hash),
          .samples = batch.batch,
          .seq_length = batch.seq_length,
          .step = call.step,
          .frozen = static_cast<std::int64_t>(call.frozen_hash),
          .labels = !batch.labels.empty(),
          .sample_labels = !batch.sample_labels.empty(),
          .sample_targets = count_sample_targets(batch)};
}

/// The hashes of a batch's fields as text, for the second message when something differs.
std::string encode(const Batch& batch) {
  std::ostringstream out;
  for (const Field& field : fields_of(batch)) out << field.hash << ' ';
  out << batch.batch << ' ' << batch.seq_length;
  return out.str();
}

struct Detail {
  std::array<std::uint64_t, kFields> hashes{};
  std::int64_t samples = 0, seq_length = 0;
};

Detail decode(const std::string& text) {
  Detail detail;
  std::istringstream in(text);
  for (std::uint64_t& hash : detail.hashes) in >> hash;
  in >> detail.samples >> detail.seq_length;
  return detail;
}

class Meeting {
 public:
  Meeting(const ProcessMesh& mesh, const BatchCall& call, const Notice& own) : mesh_(mesh) {
    for (const MeetingValues& values : meet(mesh.world(), call.name, own.values(), call.place))
      notices_.push_back(Notice::from(values));
  }

  /// The first rank of a data rank that has a batch; -1 if none has.
  int holder(int data_rank) const {
    for (int r = 0; r < size(); ++r)
      if (data_rank_of(r) == data_rank && !at(r).absent) return r;
    return -1;
  }

  /// Collective if a rank has failed; throws then.
  void check_failures(const std::exception_ptr& own) const {
    if (std::none_of(notices_.begin(), notices_.end(), [](const Notice& n) { return n.failed; })) return;
    const auto texts = all_gather_bytes(mesh_.world(), text_of(own));
    if (own) std::rethrow_exception(own);
    const auto first =
        std::find_if(texts.begin(), texts.end(), [](const auto& text) { return !text.empty(); });
    throw CommunicationError(detail::concat("rank ", first - texts.begin(), " failed: ", *first));
  }

  void check_steps() const {
    for (int r = 1; r < size(); ++r)
      TESSERA_ENSURE(DataError, at(r).step == at(0).step, "rank ", r, " has made ", at(r).step,
                     " optimizer steps and rank 0 ", at(0).step,
                     ": every rank must make the same steps, also where a condition of the script skips one");
  }

  /// Collective if ranks do not train the same parameters; throws then.
  void check_frozen(const BatchCall& call) const {
    const auto other = std::find_if(notices_.begin(), notices_.end(),
                                    [&](const Notice& n) { return n.frozen != notices_[0].frozen; });
    if (other != notices_.end()) refuse_frozen(static_cast<std::size_t>(other - notices_.begin()), call);
  }

  /// Every data rank has a batch somewhere, and either all of them have labels or none.
  void check_holders() const {
    const Notice* first = nullptr;
    int first_rank = 0;
    for (int d = 0; d < mesh_.shape().dp; ++d) {
      const int r = holder(d);
      TESSERA_ENSURE(DataError, r >= 0, "no rank of data rank ", d,
                     " was given a batch; at least one of its tensor and pipeline ranks needs one");
      if (at(r).samples == 0) continue;
      if (first == nullptr) {
        first = &at(r);
        first_rank = r;
      }
      const auto alike = [&](bool Notice::*has, const char* what) {
        TESSERA_ENSURE(DataError, at(r).*has == first->*has, "the batch of rank ",
                       at(r).*has ? r : first_rank, " has ", what, " and that of rank ",
                       at(r).*has ? first_rank : r, " has none: either all ranks give ", what,
                       " or none does");
      };
      alike(&Notice::labels, "labels");
      alike(&Notice::sample_labels, "labels of samples");
    }
  }

  /// The first rank whose batch is not that of its data rank's holder; -1 if there is none.
  int odd_one() const {
    for (int r = 0; r < size(); ++r)
      if (!at(r).absent && at(r).hash != at(holder(data_rank_of(r))).hash) return r;
    return -1;
  }

  void fill(Batch& batch) const {
    batch.most_samples = 0;
    std::int64_t targets = 0, samples = 0, before = 0, positions = 0, sample_targets = 0;
    for (int d = 0; d < mesh_.shape().dp; ++d) {
      const Notice& notice = at(holder(d));
      if (d < mesh_.coordinates().dp) before += notice.samples;
      samples += notice.samples;
      batch.most_samples = std::max(batch.most_samples, notice.samples);
      targets += notice.targets;
      positions += notice.samples * notice.seq_length;
      sample_targets += notice.sample_targets;
    }
    batch.global_targets = targets;
    batch.global_positions = positions;
    batch.global_sample_targets = sample_targets;
    if (batch.global_batch == Batch::kUnknown) batch.sample0 = before;
    batch.global_batch = samples;  // whatever this rank took it for
  }

  std::vector<int> absent_peers() const {
    std::vector<int> ranks;
    for (int r = 0; r < size(); ++r)
      if (at(r).absent && data_rank_of(r) == mesh_.coordinates().dp) ranks.push_back(r);
    return ranks;
  }

  int data_rank_of(int rank) const { return coordinates_of(mesh_.shape(), rank).dp; }

 private:
  /// `rank` is the first that freezes other parameters than rank 0.
  [[noreturn]] void refuse_frozen(std::size_t rank, const BatchCall& call) const {
    std::vector<std::set<std::string>> frozen;
    for (const std::string& text : all_gather_bytes(mesh_.world(), call.frozen ? call.frozen() : "")) {
      std::istringstream lines(text);
      frozen.emplace_back();
      for (std::string line; std::getline(lines, line);) frozen.back().insert(line);
    }
    std::vector<std::string> differing;
    std::set_symmetric_difference(frozen[0].begin(), frozen[0].end(), frozen[rank].begin(),
                                  frozen[rank].end(), std::back_inserter(differing));
    const bool first = frozen[0].contains(differing.at(0));
    throw InvalidArgument(detail::concat("ranks do not train the same parameters: '", differing[0],
                                         "' is frozen on rank ", first ? 0 : rank, " and trained on rank ",
                                         first ? rank : 0, ". Set requires_grad alike on every rank"));
  }

  int size() const { return static_cast<int>(notices_.size()); }
  const Notice& at(int rank) const { return notices_[static_cast<std::size_t>(rank)]; }

  const ProcessMesh& mesh_;
  std::vector<Notice> notices_;
};

/// Throws on every rank. Collective: `odd` is the same everywhere.
[[noreturn]] void fail_different(const ProcessMesh& mesh, const Meeting& meeting, int odd, const Batch& batch,
                                 std::int64_t step) {
  const int d = meeting.data_rank_of(odd), holder = meeting.holder(d);
  const auto texts = all_gather_bytes(mesh.world(), encode(batch));
  const Detail a = decode(texts[static_cast<std::size_t>(holder)]),
               b = decode(texts[static_cast<std::size_t>(odd)]);
  std::ostringstream what;
  const auto fields = fields_of(batch);
  for (std::size_t i = 0; i < fields.size(); ++i)
    if (a.hashes[i] != b.hashes[i]) what << ' ' << fields[i].name;
  throw DataError(detail::concat(
      "ranks ", holder, " and ", odd, " were given different batches at step ", step + 1,
      ", and both are tensor or pipeline ranks of data rank ", d,
      ", which computes one batch together. They differ in", what.str(), " (rank ", holder, ": ", a.samples,
      " x ", a.seq_length, " tokens, rank ", odd, ": ", b.samples, " x ", b.seq_length,
      "). Let the loader give both the same samples: the same seed and order on every rank, or "
      "DataLoaderConfiguration(dispatch_batches=True), which reads on rank 0 alone"));
}

void check(const ProcessMesh& mesh, const Meeting& meeting, const Batch& batch, const BatchCall& call) {
  meeting.check_failures(call.failure);
  meeting.check_steps();
  meeting.check_frozen(call);
  meeting.check_holders();
  if (const int odd = meeting.odd_one(); odd >= 0) fail_different(mesh, meeting, odd, batch, call.step);
}

}  // namespace

void agree(const ProcessMesh& mesh, Batch& batch, const BatchCall& call) {
  const Meeting meeting(mesh, call, notice_of(batch, call));
  check(mesh, meeting, batch, call);
  meeting.fill(batch);
  const std::vector<int> absent = meeting.absent_peers();
  if (absent.empty() || meeting.holder(mesh.coordinates().dp) != mesh.rank()) return;
  TESSERA_CHECK(call.give, ranks_text(absent), " came without a batch to ", call.name);
  const ExecCtx host = ExecCtx::cpu(1);
  const std::string bytes = call.give();
  const Tensor length =
      Tensor::from(host, std::vector<std::int64_t>{static_cast<std::int64_t>(bytes.size())}, {1});
  const Tensor data = Tensor::empty(host, {static_cast<std::int64_t>(bytes.size())}, DType::u8);
  data.copy_from_host(bytes.data());
  for (const int peer : absent) {
    mesh.world().send(host, length, peer).wait(host);
    mesh.world().send(host, data, peer).wait(host);
  }
}

std::string take_batch(const ProcessMesh& mesh, Batch& batch, const BatchCall& call) {
  const Meeting meeting(
      mesh, call, {.step = call.step, .frozen = static_cast<std::int64_t>(call.frozen_hash), .absent = true});
  check(mesh, meeting, batch, call);
  batch.global_batch = Batch::kUnknown;
  meeting.fill(batch);
  const int holder = meeting.holder(mesh.coordinates().dp);
  const ExecCtx host = ExecCtx::cpu(1);
  const Tensor length = Tensor::empty(host, {1}, DType::i64);
  mesh.world().recv(host, length, holder).wait(host);
  const Tensor data = Tensor::empty(host, {length.to_vector<std::int64_t>()[0]}, DType::u8);
  mesh.world().recv(host, data, holder).wait(host);
  return {static_cast<const char*>(data.raw()), static_cast<std::size_t>(data.numel())};
}

}  // namespace tessera
