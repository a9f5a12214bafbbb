#include "tessera/engine/shared_weights.hpp"

#include <algorithm>
#include <cstring>
#include <exception>
#include <map>
#include <set>

#include "checkpoint/slice_runs.hpp"
#include "engine/ranks.hpp"
#include "tessera/comm/bytes.hpp"
#include "tessera/comm/heartbeat.hpp"
#include "tessera/engine/pretrained.hpp"

namespace tessera {
namespace {

using checkpoint_detail::for_each_run;
using checkpoint_detail::intersect;

constexpr std::int64_t kBlockElements = 16 << 20;

using Pieces = std::map<std::string, std::vector<StatePiece>>;

/// Per rank a hash of every Hugging Face tensor; nothing of a rank without weights.
std::vector<std::vector<std::uint64_t>> all_digests(const HfModel* own, Communicator& world) {
  const std::vector<std::uint64_t> digests = own ? own->digests() : std::vector<std::uint64_t>();
  const std::string bytes(reinterpret_cast<const char*>(digests.data()),
                          digests.size() * sizeof(std::uint64_t));
  std::vector<std::vector<std::uint64_t>> all;
  for (const std::string& each : all_gather_bytes(world, bytes)) {
    all.emplace_back(each.size() / sizeof(std::uint64_t));
    std::memcpy(all.back().data(), each.data(), each.size());
  }
  return all;
}

/// The part of `block`, rows of a whole parameter, that belongs to these pieces.
void keep_part(const std::vector<StatePiece>& pieces, const TensorSlice& block, const float* values,
               const ExecCtx& ctx) {
  std::vector<float> part;
  for (const StatePiece& piece : pieces) {
    for (const auto& [place, state] : piece.boxes()) {
      const TensorSlice box{place.global, place.shape};
      const auto both = intersect(box, block);
      if (!both) continue;
      part.resize(static_cast<std::size_t>(both->shape.numel()));
      for_each_run(block, *both, *both, sizeof(float),
                   [&](std::uint64_t from, std::uint64_t to, std::uint64_t bytes) {
                     std::memcpy(reinterpret_cast<std::byte*>(part.data()) + to,
                                 reinterpret_cast<const std::byte*>(values) + from, bytes);
                   });
      // Blocks are whole rows, so what both have lies together in the box.
      const std::int64_t row = box.shape.numel() / box.shape[0];
      state.narrow((both->offset[0] - box.offset[0]) * row, both->shape.numel()).write(ctx, part.data());
    }
  }
}

/// The first error of a rank, which tells of it when the others wait for nothing in between.
class FirstError {
 public:
  void keep_of(const std::function<void()>& work) {
    try {
      if (!error_) work();
    } catch (const Error&) {
      error_ = std::current_exception();
    }
  }
  void tell(Communicator& world) const {
    on_every_rank(ExecCtx::cpu(1), world, [this] {
      if (error_) std::rethrow_exception(error_);
    });
  }

 private:
  std::exception_ptr error_;
};

/// `mapping`: the parameter that rank 0's model has the rows in.
void send(const HfModel* own, const HfMapping& mapping, const KeptRows& kept,
          const std::vector<StatePiece>& pieces, Communicator& world, const ExecCtx& ctx, FirstError& error) {
  const ExecCtx host = ExecCtx::cpu(1);
  const std::int64_t row = mapping.shape.numel() / mapping.shape[0];
  const std::int64_t rows = std::max<std::int64_t>(1, kBlockElements / row);
  for (std::int64_t begin = 0; begin < kept.count; begin += rows) {
    const std::int64_t end = std::min(kept.count, begin + rows);
    TensorSlice block = TensorSlice::rows(mapping.shape, kept.there + begin, kept.there + end);
    const Tensor values = Tensor::empty(host, block.shape, DType::f32);
    if (world.rank() == 0) {
      error.keep_of([&] {
        own->read_f32(mapping.name, block, {values.data<float>(), static_cast<std::size_t>(values.numel())});
      });
    }
    world.broadcast(host, values, 0).wait(host);
    block.offset[0] = kept.here + begin;
    keep_part(pieces, block, values.data<float>(), ctx);
  }
}

/// The rows that a tensor fills; null for one that is not kept.
const KeptRows* kept_of(const WeightFit& fit, const HfMapping& mapping, const HfPart& part) {
  const auto rows = fit.kept.find(mapping.name);
  if (rows == fit.kept.end()) return nullptr;
  const auto found = std::find_if(rows->second.begin(), rows->second.end(),
                                  [&](const KeptRows& each) { return each.tensor == part.name; });
  return found == rows->second.end() ? nullptr : &*found;
}

}  // namespace

std::vector<WeightDifference> load_weights_of_rank_0(const std::function<std::optional<HfModel>()>& open,
                                                     const Architecture& config, const WeightFit& fit,
                                                     Communicator& world, Engine& engine) {
  std::optional<HfModel> opened;
  on_every_rank(ExecCtx::cpu(1), world, [&] {
    try {
      if (std::optional<HfModel> model = open()) opened.emplace(std::move(*model));
    } catch (const Error&) {
      if (world.rank() == 0) throw;  // elsewhere rank 0's weights come in its place
    }
  });
  const HfModel* own = opened ? &*opened : nullptr;
  const auto digests = all_digests(own, world);
  const std::vector<HfMapping> mappings = hf_mappings(config);
  Pieces pieces;
  for (StatePiece& piece : engine.params().pieces(PieceSet::held))
    pieces[piece.parameter->name()].push_back(std::move(piece));
  std::map<int, WeightDifference> found;
  FirstError error;
  std::size_t number = 0;
  for (const HfMapping& mapping : mappings) {
    for (const HfPart& part : mapping.parts) {
      const KeptRows* kept = kept_of(fit, mapping, part);
      bool differs = false;
      for (int rank = 1; kept != nullptr && rank < world.size(); ++rank) {
        const auto& theirs = digests[static_cast<std::size_t>(rank)];
        if (!theirs.empty() && theirs.at(number) == digests[0].at(number)) continue;
        WeightDifference& difference = found[rank];
        if (difference.tensors++ == 0) difference.first = part.name;
        difference.rank = rank;
        differs = true;
      }
      ++number;
      if (kept == nullptr) continue;
      if (differs) {
        send(own, mapping, *kept, pieces[mapping.name], world, engine.ctx(), error);
      } else {
        error.keep_of([&] {
          for (const StatePiece& piece : pieces[mapping.name]) {
            read_rows(*own, *kept, piece, engine.ctx());
            heartbeat(world);
          }
        });
      }
    }
  }
  error.tell(world);
  engine.params().weights().gather();
  std::vector<WeightDifference> list;
  for (const auto& [rank, difference] : found) list.push_back(difference);
  return list;
}

}  // namespace tessera
