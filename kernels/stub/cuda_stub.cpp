/// The CUDA backend of a build that has none: every launcher of kernels/api refuses, by name.

#include "kernels/api/activation.hpp"
#include "kernels/api/attention.hpp"
#include "kernels/api/backends.hpp"
#include "kernels/api/cross_entropy.hpp"
#include "kernels/api/elementwise.hpp"
#include "kernels/api/embedding.hpp"
#include "kernels/api/gemm.hpp"
#include "kernels/api/moe.hpp"
#include "kernels/api/norm.hpp"
#include "kernels/api/optimizer.hpp"
#include "kernels/api/reduce.hpp"
#include "kernels/api/rope.hpp"
#include "kernels/api/sampling.hpp"
#include "kernels/api/split_norm.hpp"
#include "tessera/base/error.hpp"

namespace tessera::kernels::cuda {
namespace {

[[noreturn]] void no_cuda(const char* kernel) {
  throw ConfigError(detail::concat("this build of Tessera has no CUDA backend (wanted by kernel ", kernel,
                                   "): set device.type to cpu or auto, or build with -DTESSERA_CUDA=ON"));
}

}  // namespace

#define TESSERA_NO_CUDA(name, Params) \
  void name(const Params&, const Launch&) { no_cuda(#name); }

TESSERA_NO_CUDA(activation_forward, ActivationForward)
TESSERA_NO_CUDA(activation_backward, ActivationBackward)
TESSERA_NO_CUDA(swiglu_forward, SwigluForward)
TESSERA_NO_CUDA(swiglu_backward, SwigluBackward)
TESSERA_NO_CUDA(attention_forward, AttentionForward)
TESSERA_NO_CUDA(attention_backward, AttentionBackward)
TESSERA_NO_CUDA(cross_entropy_forward, CrossEntropyForward)
TESSERA_NO_CUDA(cross_entropy_combine, CrossEntropyCombine)
TESSERA_NO_CUDA(cross_entropy_backward, CrossEntropyBackward)
TESSERA_NO_CUDA(axpby, Axpby)
TESSERA_NO_CUDA(add, Add)
TESSERA_NO_CUDA(dropout, Dropout)
TESSERA_NO_CUDA(scale_by, ScaleBy)
TESSERA_NO_CUDA(copy_strided, CopyStrided)
TESSERA_NO_CUDA(fill_zero, FillZero)
TESSERA_NO_CUDA(fill_normal, FillNormal)
TESSERA_NO_CUDA(fill_constant, FillConstant)
TESSERA_NO_CUDA(embedding_forward, EmbeddingForward)
TESSERA_NO_CUDA(embedding_backward, EmbeddingBackward)
TESSERA_NO_CUDA(sample_tokens, SampleTokens)
TESSERA_NO_CUDA(append_to_cache, AppendToCache)
TESSERA_NO_CUDA(gemm, Gemm)
TESSERA_NO_CUDA(route_forward, RouteForward)
TESSERA_NO_CUDA(route_backward, RouteBackward)
TESSERA_NO_CUDA(route_sums, RouteSums)
TESSERA_NO_CUDA(balance_forward, BalanceForward)
TESSERA_NO_CUDA(sort_slots, SortSlots)
TESSERA_NO_CUDA(combine_slots, CombineSlots)
TESSERA_NO_CUDA(weigh_rows, WeighRows)
TESSERA_NO_CUDA(add_norm_forward, AddNormForward)
TESSERA_NO_CUDA(add_norm_backward, AddNormBackward)
TESSERA_NO_CUDA(norm_weight_grad, NormWeightGrad)
TESSERA_NO_CUDA(add_norm_gradients, AddNormGradients)
TESSERA_NO_CUDA(row_products, RowProducts)
TESSERA_NO_CUDA(inverse_roots, InverseRoots)
TESSERA_NO_CUDA(norm_projection, NormProjection)
TESSERA_NO_CUDA(begin_update, BeginUpdate)
TESSERA_NO_CUDA(update_groups, UpdateGroups)
TESSERA_NO_CUDA(split_main, SplitMain)
TESSERA_NO_CUDA(join_main, JoinMain)
TESSERA_NO_CUDA(adam, Adam)
TESSERA_NO_CUDA(sgd, Sgd)
TESSERA_NO_CUDA(column_sum, ColumnSum)
TESSERA_NO_CUDA(sum_squares, SumSquares)
TESSERA_NO_CUDA(sum, Sum)
TESSERA_NO_CUDA(rope, Rope)

#undef TESSERA_NO_CUDA

std::size_t attention_forward_workspace(const AttentionShape&, int) {
  no_cuda("attention_forward_workspace");
}
std::size_t attention_backward_workspace(const AttentionShape&, int) {
  no_cuda("attention_backward_workspace");
}

int norm_gradient_parts(std::int64_t, std::int64_t) { no_cuda("norm_gradient_parts"); }

Description describe() { return {{"cuda", "not in this build"}}; }

}  // namespace tessera::kernels::cuda
