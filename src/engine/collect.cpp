#include "tessera/engine/collect.hpp"

#include <cstring>
#include <map>
#include <nlohmann/json.hpp>

#include "engine/ranks.hpp"
#include "tessera/comm/bytes.hpp"
#include "tessera/ops/elementwise.hpp"

namespace tessera {
namespace {

/// A box of a parameter that one rank has.
struct Box {
  int rank = 0;
  Placed place;
};

struct Directory {
  Shape shape;
  std::vector<Box> boxes;  // together the whole parameter, each element once
};

nlohmann::json numbers_of(const Shape& shape) {
  nlohmann::json list = nlohmann::json::array();
  for (int i = 0; i < shape.rank(); ++i) list.push_back(shape[i]);
  return list;
}

Shape shape_of(const nlohmann::json& list) {
  const auto numbers = list.get<std::vector<std::int64_t>>();
  return Shape(std::span<const std::int64_t>(numbers));
}

std::vector<StatePiece> pieces_of(Engine& engine, Collected what) {
  if (what == Collected::weights) return engine.params().pieces(PieceSet::owned);
  if (what == Collected::gradients) return engine.params().gradient_pieces(PieceSet::owned);
  const char* kind = what == Collected::adam_m ? "adam_m" : what == Collected::adam_v ? "adam_v" : "momentum";
  return engine.optimizer().pieces(PieceSet::owned, kind);
}

/// What ranks have of the model, and this rank's part of it.
class Collector final : public WeightSource {
 public:
  Collector(Engine& engine, Collected what) : engine_(engine), world_(engine.mesh().world()) {
    if (what == Collected::gradients)
      factor_ = engine.params().gradient().scale() / engine.optimizer().update_state().loss_scale;
    nlohmann::json own = nlohmann::json::array();
    for (const StatePiece& piece : pieces_of(engine, what)) {
      const std::string& name = piece.parameter->name();
      for (const auto& [place, values] : piece.boxes()) {
        own_[name].push_back(values);
        own.push_back({name, numbers_of(piece.parameter->placement().global()), numbers_of(place.global),
                       numbers_of(place.shape)});
      }
    }
    const std::vector<std::string> texts = all_gather_bytes(world_, own.dump());
    for (std::size_t rank = 0; rank < texts.size(); ++rank) {
      for (const auto& item : nlohmann::json::parse(texts[rank])) {
        Directory& entry = directory_[item[0].get<std::string>()];
        entry.shape = shape_of(item[1]);
        const Shape global = shape_of(item[2]), shape = shape_of(item[3]);
        entry.boxes.push_back({static_cast<int>(rank), {.local = {}, .global = global, .shape = shape}});
      }
    }
  }

  std::vector<TensorSpec> tensors() const override {
    std::vector<TensorSpec> specs;
    for (const auto& [name, entry] : directory_) specs.push_back({name, DType::f32, entry.shape});
    return specs;
  }

  void read(const std::string& name, std::span<std::byte> out) const override {
    const auto found = directory_.find(name);
    TESSERA_CHECK(found != directory_.end(), "the model has no parameter '", name, "'");
    const Directory& entry = found->second;
    TESSERA_CHECK_EQ(static_cast<std::int64_t>(out.size()), entry.shape.numel() * 4, "bytes of '", name, "'");
    if (world_.size() > 1) tell(name);
    const Tensor whole = Tensor::wrap(out.data(), entry.shape, DType::f32);
    std::size_t own = 0;
    for (const Box& box : entry.boxes) {
      Tensor part;
      if (box.rank == world_.rank()) {
        part = own_box(name, own++);
      } else {
        part = Tensor::empty(host_, {box.place.shape.numel()}, DType::f32);
        world_.recv(host_, part, box.rank).wait(host_);
      }
      Tensor target = whole;
      for (int i = 0; i < box.place.shape.rank(); ++i)
        target = target.narrow(i, box.place.global[i], box.place.shape[i]);
      ops::copy(host_, part.view(box.place.shape), target);
    }
  }

  /// Gives rank 0 what it asks for until it has all it wanted.
  void serve() const {
    for (std::string name = heard(); !name.empty(); name = heard()) {
      const std::size_t boxes = own_.contains(name) ? own_.at(name).size() : 0;
      for (std::size_t i = 0; i < boxes; ++i) world_.send(host_, own_box(name, i), 0).wait(host_);
    }
  }
  void tell(const std::string& name) const { broadcast_bytes(world_, name); }

 private:
  std::string heard() const { return broadcast_bytes(world_, {}); }
  Tensor own_box(const std::string& name, std::size_t i) const {
    Tensor box = own_.at(name)[i].read(engine_.ctx()).to_host();
    if (factor_ == 1.0) return box;
    const Tensor scaled = Tensor::empty(host_, box.shape(), DType::f32);
    ops::axpby(host_, static_cast<float>(factor_), box, 0.0f, scaled);
    return scaled;
  }

  Engine& engine_;
  Communicator& world_;
  ExecCtx host_ = ExecCtx::cpu(1);
  double factor_ = 1;
  std::map<std::string, Directory> directory_;
  std::map<std::string, std::vector<StateValues>> own_;  // on the engine's device
};

}  // namespace

void collect(Engine& engine, Collected what, const std::function<void(const WeightSource&)>& work) {
  engine.params().weights().wait();
  engine.ctx().stream->synchronize();
  const Collector collector(engine, what);
  const ExecCtx host = ExecCtx::cpu(1);
  Communicator& world = engine.mesh().world();
  if (world.size() == 1) return work(collector);
  on_every_rank(host, world, [&] {
    if (world.rank() > 0) return collector.serve();
    try {
      work(collector);
    } catch (const CommunicationError&) {
      throw;
    } catch (...) {
      collector.tell("");
      throw;
    }
    collector.tell("");
  });
}

}  // namespace tessera
