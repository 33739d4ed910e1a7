// A stable counting sort of (token, choice) pairs by the expert that each one goes to.
#pragma once

#include <cuda_runtime.h>

namespace jgg::rows {

// An expert outside [0, experts) is none of them: such pairs come last and are not counted.
struct SortArguments {
  int const* expert;  // [batches, pairs]
  int* order;         // [batches, pairs], the pair that comes at each place
  int* inverse;       // [batches, pairs], the place of each pair
  int* group_sizes;   // [batches, experts]
  int* workspace;     // [batches, blocks, experts + 1], unused if there is one block
  int batches;
  int pairs;
  int experts;
  int blocks;  // that share the pairs of a batch
};

// The number of experts for which a block's counters have room.
constexpr int kMostExperts = 16384;

// One launch for one block, else two.
cudaError_t sort_by_expert(SortArguments const& arguments, cudaStream_t stream);

}  // namespace jgg::rows
