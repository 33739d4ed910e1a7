// What the bindings see of the rank-k and rank-2k updates: arguments in, launches on a stream out.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "scheduler/triangular.h"
#include "sm90/ragged_dot.h"

namespace jgg::sm90 {

// Updates of `matrices` matrices of [n, n] with operands of [n, k], or [k, n] if transposed, each
// kind one after another in memory.
struct RankKStack {
  void const* a;
  void const* b;  // null in a rank-k update
  void* out;
  float const* alpha;  // [matrices]
  float const* beta;   // [matrices]
  int matrices;
  int n;
  int k;
};

// What becomes of the triangle that is not computed.
enum class OtherTriangle : int { kKept, kZero, kMirrored };

// One triangle of each result:
//   rank-k   alpha A A^T + beta C
//   rank-2k  alpha (A B^T + B A^T) + beta C
// C is what `out` holds at the start, if `adds_c`.
struct RankKArguments {
  std::vector<RankKStack> stacks;
  ElementType type;      // of a and b
  ElementType out_type;  // `type` or kF32
  Uplo uplo;
  OtherTriangle other;
  bool adds_c;
  bool transpose;
};

// The configurations that are compiled.
std::vector<TileConfig> const& rank_k_tile_configs();

// cudaErrorInvalidConfiguration if there is no such kernel.
cudaError_t rank_k(TileConfig config, RankKArguments const& arguments, cudaStream_t stream);

}  // namespace jgg::sm90
