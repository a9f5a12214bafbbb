/// fp16: what does not depend on the scaling of the loss.

#include "tessera/engine/plan.hpp"
#include "tests/engine/engine_support.hpp"

namespace tessera::test {
namespace {

TEST(Fp16, StartsCloseToFp32) {
  for (Config config : {tiny_config(), tiny_llama()}) {
    const Batch batch = random_batch(4, 11, 3);
    const double exact = build_engine(config)->evaluate(batch);
    for (const bool fp32_residual : {true, false}) {
      config.training.fp32_residual = fp32_residual;
      config.training.precision = Precision::fp16;
      const double half = build_engine(config)->evaluate(batch);
      EXPECT_NE(half, exact);
      EXPECT_NEAR(half, exact, (fp32_residual ? 1.5e-4 : 6e-4) * exact);
    }
  }
}

TEST(Fp16, TakesTheMemoryOfBf16) {
  Config config = tiny_llama();
  config.training.precision = Precision::bf16;
  const Plan bf16 = make_plan(config, 2);
  config.training.precision = Precision::fp16;
  const Plan fp16 = make_plan(config, 2);
  ASSERT_EQ(fp16.ranks.size(), bf16.ranks.size());
  for (std::size_t i = 0; i < fp16.ranks.size(); ++i) {
    EXPECT_EQ(fp16.ranks[i].memory_bytes(), bf16.ranks[i].memory_bytes());
    EXPECT_EQ(fp16.ranks[i].bytes_sent(), bf16.ranks[i].bytes_sent());
    EXPECT_GT(fp16.ranks[i].memory_of("16-bit weights"), 0);
  }
}

}  // namespace
}  // namespace tessera::test
