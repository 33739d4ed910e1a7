// The layout of the parts of lists of float32 operands in the workspace.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "parts/terms.h"

namespace jgg::parts {

// Matrices of one size that follow each other in memory. Each has a multiple of 8 elements.
struct MatrixStack {
  void const* data;
  int matrices;
  int64_t elements;  // of each
};

struct StackParts {
  void* parts;       // float16 [matrices, parts_of(accuracy), elements], high parts first
  unsigned* maxima;  // [matrices], the bits of each matrix's largest magnitude
};

class ListedWorkspace {
 public:
  // Lays out the parts of `stacks` in `memory`. If `memory` is null, only the sizes are meaningful.
  ListedWorkspace(std::vector<MatrixStack> const& stacks, Accuracy accuracy, void* memory);

  // Returns the parts and maxima of a stack. The maxima of all stacks follow one another.
  StackParts const& operator[](size_t stack) const { return parts_[stack]; }
  int parts_each() const { return parts_of(accuracy_); }
  int64_t bytes() const { return bytes_; }
  // The maxima come first. They take bytes_to_clear() bytes, which prepare() sets to zero.
  void* memory() const { return memory_; }
  int64_t bytes_to_clear() const { return bytes_to_clear_; }

 private:
  uint8_t* take(int64_t bytes);

  uint8_t* memory_;
  Accuracy accuracy_;
  int64_t bytes_ = 0;
  int64_t bytes_to_clear_;
  std::vector<StackParts> parts_;
};

// Writes the largest magnitude of each matrix, and the parts of all matrices, to `workspace`, which
// has been laid out for `stacks`. This takes a memory set, and two kernels for every 160 stacks.
cudaError_t prepare(std::vector<MatrixStack> const& stacks, ListedWorkspace const& workspace,
                    cudaStream_t stream);

}  // namespace jgg::parts
