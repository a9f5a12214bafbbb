/// What ranks tell each other about their batches: differences on every kind of peer are refused on all
/// ranks.

#include <atomic>

#include "tessera/engine/pretrained.hpp"
#include "tessera/engine/shared_weights.hpp"
#include "tessera/engine/state.hpp"
#include "tessera/engine/weight_fit.hpp"
#include "tests/comm/gloo_support.hpp"
#include "tests/engine/layout_edge_support.hpp"
#include "tests/support/device.hpp"

namespace tessera::test {
namespace {

using namespace edge;

struct Planted {
  const char* name;
  const char* told;  ///< in the message
  void (*change)(Batch&);
};
void PrintTo(const Planted& planted, std::ostream* out) { *out << planted.name; }

const Planted kPlanted[] = {
    {"token", "They differ in tokens (", [](Batch& batch) { batch.tokens[5] ^= 1; }},
    {"label", "They differ in labels (", [](Batch& batch) { batch.labels.back() = kIgnoredLabel; }},
    {"position", "They differ in position_ids (",
     [](Batch& batch) { batch.position_ids.assign(batch.tokens.size(), 0); }},
    {"padding", "They differ in attention_mask (",
     [](Batch& batch) {
       batch.key_end.assign(static_cast<std::size_t>(batch.batch),
                            static_cast<std::int32_t>(batch.seq_length));
       batch.key_end[0] -= 1;
     }},
    {"documents", "They differ in document_ids (",
     [](Batch& batch) { batch.document_ids.assign(batch.tokens.size(), 3); }},
    {"number", "They differ in sample numbers (", [](Batch& batch) { batch.sample0 += 1; }},
};

class Agreement : public ::testing::TestWithParam<Planted> {};

TEST_P(Agreement, AnotherBatchOnOneRankIsRefusedOnAll) {
  for (const Overrides& layout : {kTp2, kPp2}) {
    std::atomic<int> refused = 0;
    run_local(2, {.timeout_s = 20}, [&](std::shared_ptr<Communicator> world) {
      const auto engine = build_engine(edge_config(Family::gpt2, layout), true, world);
      const Batch good = random_batch(8, kSeq, 7, kVocab);
      Batch batch = good;
      if (world->rank() == 1) GetParam().change(batch);
      engine->step(good);
      expect_error<DataError>([&] { engine->step(batch); },
                              "ranks 0 and 1 were given different batches at step 2", GetParam().told);
      engine->discard();
      engine->step(good);  // and the run may go on
      ++refused;
    });
    EXPECT_EQ(refused, 2);
  }
}
INSTANTIATE_TEST_SUITE_P(Fields, Agreement, ::testing::ValuesIn(kPlanted),
                         [](const auto& each) { return std::string(each.param.name); });

TEST(AgreementOf, LengthsCallsAndBatchesThatCannotBeUsed) {
  run_local(4, {.timeout_s = 20}, [&](std::shared_ptr<Communicator> world) {
    const auto engine =
        build_engine(edge_config(Family::gpt2, kTp2 + Overrides{"parallel.data=2"}), true, world);
    const int rank = world->rank();
    const Batch own = own_part(*engine, random_batch(8, kSeq, 7, kVocab));
    const Batch shorter = own_part(*engine, random_batch(8, kSeq - 3, 7, kVocab));
    expect_error<DataError>([&] { engine->step(rank == 3 ? shorter : own); },
                            "ranks 2 and 3 were given different batches at step 1", "They differ in shape");
    // Data ranks may differ: 0 and 1 compute one batch, 2 and 3 another one.
    engine->step(rank >= 2 ? shorter : own);

    const auto other_call = [&] {
      if (rank == 1) {
        engine->evaluate(own);
      } else {
        engine->step(own);
      }
    };
    expect_error<InvalidArgument>(other_call, "rank 1 called Engine::evaluate()",
                                  "ranks 0, 2 and 3 called Engine::forward_backward()");
    Batch bad = own;
    bad.labels[3] = kVocab;
    const auto with_bad = [&] { engine->step(rank >= 2 ? bad : own); };
    if (rank >= 2) {
      expect_error<DataError>(with_bad, "label");
    } else {
      expect_error<CommunicationError>(with_bad, "rank 2 failed: ", "label");
    }
    Batch blind = own;
    blind.labels.clear();
    expect_error<DataError>([&] { engine->forward(rank >= 2 ? blind : own, Engine::Output::logits, false); },
                            "the batch of rank 0 has labels and that of rank 2 has none");
    engine->step(own);
  });
}

TEST(AgreementOf, ABatchMayComeFromAPeer) {
  run_local(4, {.timeout_s = 20}, [&](std::shared_ptr<Communicator> world) {
    const auto engine =
        build_engine(edge_config(Family::gpt2, kTp2 + Overrides{"parallel.data=2"}), true, world);
    const int rank = world->rank();
    const BatchCall call = engine->about({.name = "model()"});
    if (rank == 1 || rank == 2) {
      Batch facts;
      EXPECT_EQ(take_batch(engine->mesh(), facts, call), rank == 1 ? "from 0" : "from 3");
      EXPECT_EQ(facts.global_batch, 5);
      EXPECT_EQ(facts.sample0, rank == 1 ? 0 : 2);
      EXPECT_EQ(facts.global_targets, 5 * (kSeq - 1));
    } else {
      Batch batch = random_batch(rank == 0 ? 2 : 3, kSeq, 7, kVocab);
      batch.global_batch = Batch::kUnknown;
      BatchCall giving = call;
      giving.give = [&] { return "from " + std::to_string(rank); };
      agree(engine->mesh(), batch, giving);
      EXPECT_EQ(batch.global_batch, 5);
      EXPECT_EQ(batch.sample0, rank == 0 ? 0 : 2);
    }
    if (rank >= 2) {
      Batch facts;
      expect_error<DataError>([&] { take_batch(engine->mesh(), facts, call); },
                              "no rank of data rank 1 was given a batch");
    } else {
      Batch batch = random_batch(2, kSeq, 7, kVocab);
      expect_error<DataError>([&] { agree(engine->mesh(), batch, call); },
                              "no rank of data rank 1 was given a batch");
    }
  });
}

TEST(AgreementOf, TooManySetsOfParametersOnOneStageEndBoth) {
  run_ranks(2, {.timeout_s = 60}, [&](std::shared_ptr<Communicator> world) {
    const auto engine = build_engine(
        edge_config(Family::gpt2,
                    kPp2 + Overrides{"model.num_layers=24", "parallel.pipeline_layout=\"23,1\""}),
        true, world);
    // Stage 0 has 278 parameters. 253 of them had numbers of updates of their own: with the others' two
    // groups these are 255 sets.
    Optimizer& optimizer = engine->optimizer();
    UpdateState state = optimizer.update_state();
    state.updates = 300;
    optimizer.set_update_state(state);
    const std::string last = "decoder.layers.22.mlp.linear_fc2.weight";
    std::int64_t own = 0;
    if (world->rank() == 0) {
      optimizer.set_updates_of([&](const Parameter& parameter) {
        return own < 253 && parameter.name() != last ? own++ : std::int64_t{300};
      });
    }
    const Batch batch = random_batch(8, kSeq, 7, kVocab);
    engine->set_frozen({{last, last}});
    engine->step(batch);
    engine->set_frozen({});
    for (int again = 0; again < 2; ++again) {
      engine->forward_backward(batch);
      if (world->rank() == 0) {
        expect_error<InvalidArgument>([&] { engine->update(); }, "256 sets of parameters");
      } else {
        expect_error<CommunicationError>([&] { engine->update(); }, "rank 0 failed: 256 sets of parameters");
      }
    }
  });
}

// What is planted on rank 1 of two, on each kind of peer, over each kind of group (on a GPU: with NCCL
// above).

struct Peer {
  const char* name;
  Overrides layout;
};
using RunOver = void (*)(const RankFunction&);
struct Transport {
  const char* name;
  RunOver run;
};

const Peer kPeers[] = {{"data", {"parallel.data=2"}}, {"tensor", kTp2}, {"pipeline", kPp2}};
const CommOptions kPatience{.timeout_s = 60};
const Transport kTransports[] = {
    {"threads", [](const RankFunction& fn) { run_ranks(2, kPatience, fn); }},
    {"gloo", [](const RankFunction& fn) { run_gloo(2, kPatience, fn); }},
};

class PlantedDisagreement : public FolderTest,
                            public ::testing::WithParamInterface<std::tuple<Transport, Peer>> {
 protected:
  const Overrides& layout() const { return std::get<Peer>(GetParam()).layout; }
  bool of_data() const { return std::get<Peer>(GetParam()).layout == kPeers[0].layout; }
  /// On both ranks, `odd` telling whether this is the one that differs.
  void run(const std::function<void(std::shared_ptr<Communicator>, bool odd)>& fn) const {
    std::get<Transport>(GetParam()).run([&](std::shared_ptr<Communicator> world) {
      const bool odd = world->rank() == 1;
      fn(std::move(world), odd);
    });
  }
  std::unique_ptr<Engine> engine(const std::shared_ptr<Communicator>& world,
                                 const Overrides& more = {}) const {
    return build_engine(edge_config(Family::gpt2, layout() + more), true, world);
  }
};

TEST_P(PlantedDisagreement, ConfigurationsAreRefused) {
  run([&](std::shared_ptr<Communicator> world, bool odd) {
    for (const auto& [key, ours, other] :
         {std::tuple("optimizer.lr", "0.001", "0.5"), std::tuple("training.seed", "1234", "99"),
          std::tuple("model.dropout", "0.1", "0.2"), std::tuple("optimizer.clip_grad", "1.0", "2.0")}) {
      const Overrides own =
          odd ? Overrides{std::string(key) + "=" + other} : Overrides{std::string(key) + "=" + ours};
      expect_error<ConfigError>([&] { engine(world, own); }, "different configurations",
                                std::string(key) + " is " + ours + " on rank 0 and " + other + " on rank 1");
    }
    engine(world, {odd ? "device.threads=2" : "device.threads=1"});  // a rank's own
  });
}

TEST_P(PlantedDisagreement, TheWeightsOfRank0Count) {
  run([&](std::shared_ptr<Communicator> world, bool odd) {
    const Config whole = edge_config(Family::gpt2, {});
    const auto first = build_engine(whole);
    const auto others = build_engine(with_overrides(whole, {"training.seed=99"}));
    const Architecture config = architecture_of(whole.model);
    const std::filesystem::path own = dir_ / (odd ? "other" : "first");
    export_hf(own, config, weights_of(odd ? *others : *first), {});
    const auto trained = engine(world);
    const auto open = [&] { return std::optional<HfModel>(open_model(own)); };
    const auto differences =
        load_weights_of_rank_0(open, config, weight_fit(config, config), *world, *trained);
    ASSERT_EQ(differences.size(), 1u);
    EXPECT_EQ(differences[0].rank, 1);
    const Batch batch = random_batch(8, kSeq, 7, kVocab);
    const double expected = first->evaluate(batch);
    EXPECT_GT(std::abs(others->evaluate(batch) - expected), 1e-3);
    EXPECT_NEAR(trained->evaluate(own_part(*trained, batch)), expected, 1e-5 * expected);
  });
}

TEST_P(PlantedDisagreement, BatchesAreComparedWhereOneIsComputedTogether) {
  run([&](std::shared_ptr<Communicator> world, bool odd) {
    const auto trained = engine(world);
    const Batch good = own_part(*trained, random_batch(8, kSeq, 7, kVocab));
    for (const Planted& planted : {kPlanted[0], kPlanted[1]}) {
      Batch batch = good;
      if (odd) planted.change(batch);
      if (of_data()) {
        trained->step(batch);
      } else {
        expect_error<DataError>([&] { trained->step(batch); }, "ranks 0 and 1 were given different batches",
                                planted.told);
      }
    }
    trained->step(good);
  });
}

TEST_P(PlantedDisagreement, CallsAndRatesAreRefused) {
  run([&](std::shared_ptr<Communicator> world, bool odd) {
    const auto trained = engine(world);
    const Batch batch = own_part(*trained, random_batch(8, kSeq, 7, kVocab));
    trained->forward_backward(batch);
    const std::vector<UpdateRates> rates(trained->optimizer().groups().size(), {.lr = odd ? 0.25 : 0.5});
    expect_error<InvalidArgument>([&] { trained->update(rates); }, "different rates", "lr 0.5", "on rank 0",
                                  "lr 0.25", "on rank 1");
    const auto extra = [&] {
      if (odd) trained->evaluate(batch);
      trained->update();
    };
    expect_error<InvalidArgument>(extra, "rank 0 called Engine::update()",
                                  "rank 1 called Engine::evaluate()");
    trained->update();
    const auto missing = [&] {
      if (!odd) trained->forward_backward(batch);
      trained->update();
    };
    expect_error<InvalidArgument>(missing, "rank 0 called Engine::forward_backward()",
                                  "rank 1 called Engine::update()");
    trained->step(batch);
  });
}

TEST_P(PlantedDisagreement, FactorsOfCallsAreCompared) {
  run([&](std::shared_ptr<Communicator> world, bool odd) {
    const auto trained = engine(world);
    const Batch batch = own_part(*trained, random_batch(8, kSeq, 7, kVocab));
    trained->forward_backward(batch);
    trained->open_call(batch).add(odd ? 0.25 : 0.5);
    expect_error<InvalidArgument>([&] { trained->update(); }, "factors 1 0.5 on rank 0",
                                  "factors 1 0.25 on rank 1");
    trained->discard();
    trained->step(batch);
  });
}

TEST_P(PlantedDisagreement, BackwardPassesOfOwnLossesAreCompared) {
  run([&](std::shared_ptr<Communicator> world, bool odd) {
    const auto trained = engine(world);
    const Batch batch = own_part(*trained, random_batch(8, kSeq, 7, kVocab));
    const auto forward = [&] { return trained->forward(batch, Engine::Output::logits); };
    const auto upstream_of = [&](const Tensor& logits) {
      if (!logits) return Tensor();
      std::vector<float> values(static_cast<std::size_t>(logits.numel()));
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 7) - 3.0f;
      return Tensor::from(trained->ctx(), values, logits.shape());
    };
    OpenForward first = forward();
    if (odd) {
      trained->discard();
      expect_error<InvalidArgument>([&] { trained->evaluate(batch); }, "rank 0 called Engine::backward()",
                                    "rank 1 called Engine::evaluate()");
    } else {
      expect_error<InvalidArgument>([&] { first.backward(upstream_of(first.output)); },
                                    "rank 0 called Engine::backward()", "rank 1 called Engine::evaluate()");
    }
    OpenForward second = forward(), last = forward();
    const Tensor upstream = upstream_of(last.output);
    expect_error<InvalidArgument>([&] { (odd ? last : second).backward(upstream); },
                                  "rank 1 runs backward() of forward number");
    // Rank 1 has the head in each of these layouts.
    const auto with_none = [&] { last.backward(odd ? Tensor() : upstream); };
    if (odd) {
      expect_error<InvalidArgument>(with_none, "backward() needs the gradient");
    } else {
      expect_error<CommunicationError>(with_none, "rank 1 failed: ", "backward() needs the gradient");
    }
    Tensor other = upstream;
    if (odd) {  // two columns of one position, as another label of it changes them
      std::vector<float> values = upstream.to_floats();
      std::swap(values[3], values[4]);
      other = Tensor::from(trained->ctx(), values, upstream.shape());
    }
    const auto with_other = [&] { last.backward(other); };
    if (std::get<Peer>(GetParam()).layout == kTp2 && trained->ctx().device().is_cpu()) {
      expect_error<DataError>(with_other, "ranks 0 and 1 gave backward() different gradients");
      last.backward(upstream);
    } else {
      with_other();
    }
    trained->update();
  });
}

TEST_P(PlantedDisagreement, ACheckpointThatOneRankCannotReadIsAnErrorOnBoth) {
  run([&](std::shared_ptr<Communicator> world, bool odd) {
    const auto trained = engine(world);
    const Batch batch = own_part(*trained, random_batch(8, kSeq, 7, kVocab));
    trained->step(batch);
    const RunState state{.step = 1, .config = edge_config(Family::gpt2, layout())};
    const auto saved = save_engine(dir_ / "saved", *trained, state, {});
    const auto from = [&](const std::filesystem::path& own) { resume_engine(own, *trained); };
    const auto refused = [&](const std::filesystem::path& unreadable, const char* why) {
      if (odd) {
        expect_error<Error>([&] { from(unreadable); }, why);
      } else {
        expect_error<CommunicationError>([&] { from(saved); }, "rank 1 failed: ", why);
      }
    };
    refused(dir_ / "nowhere", "nowhere");
    const std::filesystem::path cut = dir_ / "cut";
    if (odd) {
      std::filesystem::copy(saved, cut, std::filesystem::copy_options::recursive);
      for (const auto& file : std::filesystem::directory_iterator(cut))
        if (file.path().extension() == ".safetensors") std::filesystem::resize_file(file, 100);
    }
    refused(cut, "safetensors");
    EXPECT_EQ(resume_engine(saved, *trained).step, 1);
    trained->step(batch);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, PlantedDisagreement,
                         ::testing::Combine(::testing::ValuesIn(kTransports), ::testing::ValuesIn(kPeers)),
                         [](const auto& each) {
                           return std::string(std::get<0>(each.param).name) + "_" +
                                  std::get<1>(each.param).name;
                         });

}  // namespace
}  // namespace tessera::test
