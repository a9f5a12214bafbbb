#pragma once
#include "kernels/api/optimizer.hpp"
#include "kernels/cpu/vector/isa.hpp"

/// Elements [begin, end) of an update, all of one group; or of split_main and join_main.
TESSERA_EACH_ISA(void adam_range(const Adam& params, const AdamFactors& factors, std::int64_t begin,
                                 std::int64_t end);
                 void sgd_range(const Sgd& params, const SgdFactors& factors, std::int64_t begin,
                                std::int64_t end);
                 void split_main_range(const SplitMain& params, std::int64_t begin, std::int64_t end);
                 void join_main_range(const JoinMain& params, std::int64_t begin, std::int64_t end);)
