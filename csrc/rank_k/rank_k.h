// The interface of rank-k and rank-2k updates: arguments in, launches on a stream out.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "scheduler/triangular.h"
#include "types.h"

namespace jgg {

// Updates of `matrices` matrices [n, n] with operands [n, k], or [k, n] if transposed. The matrices
// of each array follow each other in memory.
struct RankKStack {
  void const* a;
  void const* b;  // null in a rank-k update
  void* out;
  void const* c;  // may be `out`
  float const* alpha;
  float const* beta;
  int matrices;
  int n;
  int k;
  // The distance from the alpha or beta of a matrix to that of the next matrix, 0 if all matrices
  // share it.
  int alpha_stride = 1;
  int beta_stride = 1;
  float const* diagonal = nullptr;
  int diagonal_stride = 1;
  // The bits of each matrix's largest magnitude from this stack's first matrix on, for operands in
  // float16 parts.
  unsigned const* a_maxima = nullptr;
  unsigned const* b_maxima = nullptr;
};

// One triangle of each result:
//   rank-k            alpha A A^T + beta C + diagonal I
//   rank-2k           alpha (A B^T + B A^T) + beta C + diagonal I
//   symmetric product alpha A B^T + beta C + diagonal I
// C is added if `adds_c`. C is `out` itself if the other triangle is kept.
struct RankKArguments {
  std::vector<RankKStack> stacks;
  ElementType type;      // of a and b
  ElementType out_type;  // `type` or kF32
  Uplo uplo;
  OtherTriangle other;
  bool adds_c;
  bool transpose;
  bool one_product = false;  // A B^T alone, if there is a b
  bool adds_diagonal = false;
  bool may_halve = true;                // whether narrow tiles may be halved if that is faster
  Accuracy accuracy = Accuracy::kTf32;  // of products of float32
  // Receives the parts of float32 operands.
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
};

// Returns how many bytes of workspace float32 operands need.
int64_t rank_k_workspace_bytes(RankKArguments const& arguments);
// Splits float32 operands into parts in the workspace. Sets `parts` to the same updates, with
// pointers to the parts.
cudaError_t split_operands(RankKArguments const& arguments, RankKArguments& parts,
                           cudaStream_t stream);

// Returns kNotCompiled if there is no such kernel.
cudaError_t rank_k(TileConfig config, RankKArguments const& arguments, cudaStream_t stream);

}  // namespace jgg
