#include "tests/comm/conformance.hpp"
#include "tests/comm/gloo_support.hpp"

namespace tessera::test {

INSTANTIATE_TEST_SUITE_P(Gloo, Conformance, testing::Values(Backend{"gloo", 3, run_gloo}), backend_name);
INSTANTIATE_TEST_SUITE_P(Gloo, ConformanceFaults, testing::Values(Backend{"gloo", 4, run_gloo}),
                         backend_name);

}  // namespace tessera::test
