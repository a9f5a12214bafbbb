/// What ranks tell each other about their batches: differences on every kind of peer are refused on all
/// ranks.

#include <atomic>

#include "tests/engine/layout_edge_support.hpp"

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
    expect_error<DataError>([&] { engine->predict(rank >= 2 ? blind : own, Engine::Output::logits); },
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

}  // namespace
}  // namespace tessera::test
