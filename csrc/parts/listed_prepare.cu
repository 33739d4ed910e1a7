#include <algorithm>
#include <limits>

#include "parts/listed_workspace.h"
#include "parts/vector.h"
#include "scheduler/warp.h"

namespace jgg::parts {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kStep = kWarpSize * kVector;  // elements that a warp reads at once
constexpr int kUnit = 8 * kStep;            // elements of one matrix that are the work of a warp
constexpr int kMaxStacks = 160;             // in a launch: both operands of a list of products fit

struct Stack {
  float const* data;
  __half* parts;
  unsigned* maxima;
  int64_t elements;  // of each matrix
  int first_unit;    // units of the stacks before this one
};

struct Stacks {
  Stack stack[kMaxStacks];
  int count;
  int units;
  bool has_low;

  // Returns the last stack that begins at or before `unit`.
  __device__ Stack const& find(int unit) const {
    int low = 0, high = count;
    while (high - low > 1) {
      int const middle = (low + high) / 2;
      (stack[middle].first_unit <= unit ? low : high) = middle;
    }
    return stack[low];
  }
};

int64_t units_per_matrix(int64_t elements) { return (elements + kUnit - 1) / kUnit; }

// Elements [first, end) of a matrix.
struct Unit {
  int matrix;
  int64_t first;
  int64_t end;

  __device__ Unit(Stack const& stack, int unit) {
    int const of_matrix = static_cast<int>((stack.elements + kUnit - 1) / kUnit);
    matrix = (unit - stack.first_unit) / of_matrix;
    first = int64_t(unit - stack.first_unit - matrix * of_matrix) * kUnit;
    end = min(first + kUnit, stack.elements);
  }
};

__device__ int warp_of_grid() { return blockIdx.x * kWarps + threadIdx.x / kWarpSize; }

// Returns the offset of this lane's first vector from the start of a unit.
__device__ int first_element() { return threadIdx.x % kWarpSize * kVector; }

__global__ void __launch_bounds__(kThreads)
    find_list_maxima(__grid_constant__ Stacks const stacks) {
  int const number = warp_of_grid();
  if (number >= stacks.units) return;
  Stack const& stack = stacks.find(number);
  Unit const unit(stack, number);
  float const* const data = stack.data + unit.matrix * stack.elements;
  unsigned largest = 0;
#pragma unroll 4
  for (int64_t at = unit.first + first_element(); at < unit.end; at += kStep) {
    Vector const vector(data + at);
#pragma unroll
    for (int i = 0; i < kVector; ++i) largest = max(largest, finite_magnitude(vector.x[i]));
  }
  largest = __reduce_max_sync(~0u, largest);
  if (threadIdx.x % kWarpSize == 0) raise(stack.maxima + unit.matrix, largest);
}

__global__ void __launch_bounds__(kThreads) split_lists(__grid_constant__ Stacks const stacks) {
  // Warps begin at the end, because the search for maxima has read the end last, so it is still in
  // L2.
  int const number = stacks.units - 1 - warp_of_grid();
  if (number < 0) return;
  Stack const& stack = stacks.find(number);
  Unit const unit(stack, number);
  float const scale = scale_of(stack.maxima[unit.matrix]);
  float const* const data = stack.data + unit.matrix * stack.elements;
  __half* const high = stack.parts + unit.matrix * stack.elements * (stacks.has_low ? 2 : 1);
  __half* const low = stacks.has_low ? high + stack.elements : nullptr;
#pragma unroll 2
  for (int64_t at = unit.first + first_element(); at < unit.end; at += kStep) {
    store_parts(Vector(data + at), [=](int) { return scale; }, high, low, at);
  }
}

}  // namespace

cudaError_t prepare(std::vector<MatrixStack> const& stacks, ListedWorkspace const& workspace,
                    cudaStream_t stream) {
  cudaError_t const status =
      cudaMemsetAsync(workspace.memory(), 0, workspace.bytes_to_clear(), stream);
  if (status != cudaSuccess) return status;
  for (size_t first = 0; first < stacks.size(); first += kMaxStacks) {
    Stacks launch{};
    launch.count = static_cast<int>(std::min<size_t>(stacks.size() - first, kMaxStacks));
    launch.has_low = workspace.parts_each() > 1;
    int64_t units = 0;
    for (int i = 0; i < launch.count; ++i) {
      MatrixStack const& stack = stacks[first + i];
      StackParts const& parts = workspace[first + i];
      launch.stack[i] = {static_cast<float const*>(stack.data), static_cast<__half*>(parts.parts),
                         parts.maxima, stack.elements, static_cast<int>(units)};
      units += stack.matrices * units_per_matrix(stack.elements);
      if (units > std::numeric_limits<int>::max() - kWarps) return cudaErrorInvalidValue;
    }
    launch.units = static_cast<int>(units);
    int const blocks = (launch.units + kWarps - 1) / kWarps;
    find_list_maxima<<<blocks, kThreads, 0, stream>>>(launch);
    split_lists<<<blocks, kThreads, 0, stream>>>(launch);
  }
  return cudaGetLastError();
}

}  // namespace jgg::parts
