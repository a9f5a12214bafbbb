#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "support.hpp"
#include "tessera/base/config_model.hpp"
#include "tessera/base/error.hpp"

namespace tessera::test {
namespace {

constexpr std::int64_t kSequence = 128;

ModelConfig gpt(std::int64_t layers, std::int64_t width, std::int64_t vocab) {
  ModelSettings model;
  model.num_layers = layers;
  model.hidden_size = width;
  model.num_heads = 4;
  model.vocab_size = vocab;
  return model;
}

std::vector<std::int64_t> counts(const std::vector<PieceLayers>& pieces) {
  std::vector<std::int64_t> result;
  for (const PieceLayers& piece : pieces) result.push_back(piece.count);
  return result;
}

/// Costs by formulas of this test: 12 width^2 weights a layer, attention's causal half, the head's GEMM with
/// the loss, the embedding's row.
struct Costs : PartCosts {
  explicit Costs(const ModelConfig& m) {
    const double c = static_cast<double>(m.hidden_size), v = static_cast<double>(m.vocab_size);
    layer = 6 * 12 * c * c + 6 * c * static_cast<double>(kSequence);
    head = 6 * c * v + 5 * v;
    embedding = 2 * c;
  }
  std::vector<double> of(const std::vector<std::int64_t>& layers) const {
    std::vector<double> costs;
    for (const std::int64_t n : layers) costs.push_back(static_cast<double>(n) * layer);
    costs.front() += embedding;
    costs.back() += head;
    return costs;
  }
};

void for_all_cuts(std::int64_t layers, int pieces,
                  const std::function<void(const std::vector<std::int64_t>&)>& f,
                  std::vector<std::int64_t> begun = {}) {
  if (static_cast<int>(begun.size()) + 1 == pieces) {
    begun.push_back(layers);
    return f(begun);
  }
  const std::int64_t others = pieces - static_cast<std::int64_t>(begun.size()) - 1;
  for (std::int64_t n = 1; n <= layers - others; ++n) {
    begun.push_back(n);
    for_all_cuts(layers - n, pieces, f, begun);
    begun.pop_back();
  }
}

double largest(const std::vector<double>& values) { return *std::max_element(values.begin(), values.end()); }
double squares(const std::vector<double>& values) {
  return std::inner_product(values.begin(), values.end(), values.begin(), 0.0);
}

TEST(CutLayers, IsTheBestOfAllCuts) {
  for (const std::int64_t vocab : {50, 400, 1500, 6000})
    for (std::int64_t layers = 1; layers <= 10; ++layers)
      for (int pieces = 1; pieces <= std::min<std::int64_t>(layers, 5); ++pieces) {
        const ModelConfig model = gpt(layers, 64, vocab);
        const Costs costs(model);
        const auto cut = counts(cut_layers(layers, pieces, std::nullopt, costs));
        const std::vector<double> ours = costs.of(cut);
        for_all_cuts(layers, pieces, [&](const std::vector<std::int64_t>& other) {
          const std::vector<double> theirs = costs.of(other);
          EXPECT_LE(largest(ours), largest(theirs) * (1 + 1e-9)) << layers << ' ' << pieces << ' ' << vocab;
          EXPECT_LE(squares(ours), squares(theirs) * (1 + 1e-9)) << layers << ' ' << pieces << ' ' << vocab;
        });
      }
}

TEST(CutLayers, EvensOutTheStagesOfASchedule) {
  for (const auto& [kind, p] : {std::pair{PipelineSchedule::zb_v, 2}, std::pair{PipelineSchedule::zb_v, 3},
                                std::pair{PipelineSchedule::interleaved, 2}})
    for (const std::int64_t vocab : {50, 1500, 6000})
      for (std::int64_t layers = 2 * p; layers <= 11; ++layers) {
        const ModelConfig model = gpt(layers, 64, vocab);
        const Costs costs(model);
        const Schedule schedule = make_schedule(kind, p, 2, p);
        const auto loads = [&](const std::vector<std::int64_t>& cut) {
          const std::vector<double> pieces = costs.of(cut);
          std::vector<double> stages(static_cast<std::size_t>(p), 0.0);
          for (int piece = 0; piece < 2 * p; ++piece) {
            stages[static_cast<std::size_t>(schedule.stage_of(piece))] +=
                pieces[static_cast<std::size_t>(piece)];
          }
          return stages;
        };
        const auto ours = loads(counts(cut_layers(layers, schedule, std::nullopt, costs)));
        for_all_cuts(layers, 2 * p, [&](const std::vector<std::int64_t>& other) {
          EXPECT_LE(largest(ours), largest(loads(other)) * (1 + 1e-9)) << layers << ' ' << vocab;
        });
      }
}

TEST(CutLayers, KnownCuts) {
  // The head of GPT-2 costs about five layers.
  const PartCosts gpt2{.layer = 1, .embedding = 0.001, .head = 4.9};
  const auto halves = cut_layers(12, 2, std::nullopt, gpt2);
  EXPECT_EQ(counts(halves), (std::vector<std::int64_t>{8, 4}));
  EXPECT_EQ(halves[0].first, 0);
  EXPECT_TRUE(halves[0].embedding);
  EXPECT_FALSE(halves[0].head);
  EXPECT_EQ(halves[1].first, 8);
  EXPECT_FALSE(halves[1].embedding);
  EXPECT_TRUE(halves[1].head);
  const auto whole = cut_layers(12, 1, std::nullopt, gpt2);
  ASSERT_EQ(whole.size(), 1u);
  EXPECT_EQ(whole[0].count, 12);
  EXPECT_TRUE(whole[0].embedding && whole[0].head);
  // Middle pieces alike: the earlier has more.
  EXPECT_EQ(counts(cut_layers(8, 3, std::nullopt, Costs(gpt(8, 64, 50)))),
            (std::vector<std::int64_t>{3, 3, 2}));
  EXPECT_EQ(counts(cut_layers(6, 4, std::nullopt, Costs(gpt(6, 64, 50)))),
            (std::vector<std::int64_t>{1, 2, 2, 1}));
}

TEST(CutLayers, FollowsALayout) {
  const auto pieces = cut_layers(12, 4, "3, 4,4,1", Costs(gpt(12, 64, 100)));
  EXPECT_EQ(counts(pieces), (std::vector<std::int64_t>{3, 4, 4, 1}));
  EXPECT_EQ(pieces[3].first, 11);
  EXPECT_TRUE(pieces[0].embedding && pieces[3].head);
  EXPECT_EQ(counts(cut_layers(12, 4, "0,6,6,0", Costs(gpt(12, 64, 100)))),
            (std::vector<std::int64_t>{0, 6, 6, 0}));
}

void expect_refused(const std::string& layout, const std::string& words) {
  try {
    cut_layers(12, 4, layout, Costs(gpt(12, 64, 100)));
    FAIL() << layout;
  } catch (const ConfigError& error) {
    const std::string what = error.what();
    EXPECT_NE(what.find(words), std::string::npos) << what;
    EXPECT_NE(what.find("pipeline_layout"), std::string::npos) << what;
  }
}

TEST(CutLayers, RefusesLayoutsThatDoNotFit) {
  expect_refused("3,4,5", "3 entries for 4 pieces");
  expect_refused("3,3,3,3,0", "5 entries");
  expect_refused("3,4,4,2", "adds up to 13 layers; the model has 12");
  expect_refused("6,0,3,3", "entry 2 leaves a piece without layers");
  for (const char* text : {"3,4,,5", "", "3,4,4,1,", "3,4,-4,9", "3,4,4.5,1", "3 4 4 1", "a,b,c,d",
                           "99999999999999999999,1,1,1", "+3,4,4,1"}) {
    expect_refused(text, "must be a number of layers");
  }
}

TEST(CutLayers, RefusesMorePiecesThanLayers) {
  try {
    cut_layers(3, 4, std::nullopt, Costs(gpt(3, 64, 100)));
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("model.num_layers (3) is less than the 4 pieces"),
              std::string::npos)
        << error.what();
  }
  EXPECT_THROW(cut_layers(3, 0, std::nullopt, Costs(gpt(3, 64, 100))), InvalidArgument);
}

/// Of an encoder's layers and a decoder's, which cost more: no cut has a smaller largest piece, none of these
/// is evener, and of equal ones earlier pieces get more.
TEST(CutLayers, LayersThatAreNotAlike) {
  PartCosts costs{.layer = 1, .embedding = 0.5, .head = 4};
  costs.layers = {3, 3, 3, 3, 5, 5, 5};
  const auto of = [&](const std::vector<std::int64_t>& cut) {
    std::vector<double> list;
    std::size_t layer = 0;
    for (const std::int64_t count : cut) {
      list.push_back(0);
      for (std::int64_t i = 0; i < count; ++i) list.back() += costs.layers[layer++];
    }
    list.front() += costs.embedding;
    list.back() += costs.head;
    return list;
  };
  const auto squares = [](const std::vector<double>& list) {
    return std::inner_product(list.begin(), list.end(), list.begin(), 0.0);
  };
  for (int pieces = 1; pieces <= 7; ++pieces) {
    const std::vector<double> best = of(counts(cut_layers(7, pieces, std::nullopt, costs)));
    for_all_cuts(7, pieces, [&](const std::vector<std::int64_t>& cut) {
      const std::vector<double> other = of(cut);
      EXPECT_LE(largest(best), largest(other) + 1e-9);
      if (largest(other) <= largest(best) + 1e-9) {
        EXPECT_LE(squares(best), squares(other) + 1e-9);
      }
    });
  }
  costs = {.layer = 1, .embedding = 0, .head = 0, .layers = {1, 1, 1}};
  EXPECT_EQ(counts(cut_layers(3, 2, std::nullopt, costs)), (std::vector<std::int64_t>{2, 1}));
  EXPECT_EQ(counts(cut_layers(3, 2, "1,2", costs)), (std::vector<std::int64_t>{1, 2}));
}

}  // namespace
}  // namespace tessera::test
