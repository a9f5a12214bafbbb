#include "kernels/cpu/vector/embedding.hpp"
#include "kernels/api/elementwise.hpp"
#include "kernels/cpu/parallel.hpp"

namespace tessera::kernels::cpu {

void embedding_forward(const EmbeddingForward& params, const Launch& launch) {
  auto* rows = TESSERA_PICK(embedding_forward_rows);
  parallel_for(launch.threads, params.rows, 4,
               [&](std::int64_t begin, std::int64_t end, int) { rows(params, begin, end); });
}

void embedding_backward(const EmbeddingBackward& params, const Launch& launch) {
  if (params.beta == 0.0f) {
    fill_zero(
        {.bytes = params.count * params.cols * static_cast<std::int64_t>(sizeof(float)), .x = params.dtable},
        launch);
  }
  // Threads share out the columns, not the rows: every sum then runs over rising rows whatever the number of
  // threads, and a token that fills half the batch costs nobody more than another.
  auto* columns = TESSERA_PICK(embedding_backward_columns);
  parallel_for(launch.threads, params.cols, kEmbeddingColumns,
               [&](std::int64_t begin, std::int64_t end, int) { columns(params, begin, end); });
}

}  // namespace tessera::kernels::cpu
