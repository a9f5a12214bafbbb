#pragma once
#include "kernels/api/moe.hpp"
#include "kernels/cpu/vector/isa.hpp"

/// Experts a thread takes of the sums over a sample.
namespace tessera::kernels::cpu {
inline constexpr std::int64_t kRouteColumns = 64;
}

/// Tokens, or rows, [begin, end); of the sums, experts [begin, end) of one sample.
TESSERA_EACH_ISA(void route_forward_rows(const RouteForward& params, std::int64_t begin, std::int64_t end);
                 void route_backward_rows(const RouteBackward& params, std::int64_t begin, std::int64_t end);
                 void route_sums_columns(const RouteSums& params, std::int64_t sample, std::int64_t begin,
                                         std::int64_t end);
                 void combine_slots_rows(const CombineSlots& params, std::int64_t begin, std::int64_t end);
                 void weigh_rows_rows(const WeighRows& params, std::int64_t begin, std::int64_t end);)
