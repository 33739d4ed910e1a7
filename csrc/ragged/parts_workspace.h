// The layout of the parts of float32 operands, and of their maxima, in the workspace.
#pragma once

#include <cstdint>

#include "ragged/ragged_dot.h"

namespace jgg {

// One operand as the kernels read it: `outer` matrices [rows, columns] of each of its parts.
struct OperandParts {
  void* parts;       // float16 [parts::parts_of(accuracy), outer, rows, columns], high parts first
  unsigned* maxima;  // [batches, local_groups], the bits of each group's largest magnitude
  int64_t outer;     // batches if the operand is ragged, else batches times groups
  int64_t part_stride;  // elements from a high part to the low part
  bool batched;         // whether each batch has parts of its own
};

class RaggedWorkspace {
 public:
  // Lays out the workspace of a product. If `arguments.workspace` is null, only bytes() is
  // meaningful.
  explicit RaggedWorkspace(RaggedDotArguments const& arguments);

  OperandParts const& lhs() const { return lhs_; }
  OperandParts const& rhs() const { return rhs_; }
  // [batches, m]: the local group that owns each row, -1 if no local group does.
  int* owners() const { return owners_; }
  // [rhs().outer]: whether any row is multiplied by this matrix of rhs. Null if rhs is ragged.
  int* in_use() const { return in_use_; }
  // Whether batches differ in which rows their groups own.
  bool owners_batched() const { return owners_batched_; }
  int64_t bytes() const { return bytes_; }
  // The maxima and in_use() come first. They take bytes_to_clear() bytes, which prepare() sets to
  // zero.
  void* memory() const { return memory_; }
  int64_t bytes_to_clear() const { return bytes_to_clear_; }

 private:
  template <class T>
  T* take(int64_t count);
  void take_parts(OperandParts& operand, int64_t elements, Accuracy accuracy);

  uint8_t* memory_;
  int64_t bytes_ = 0;
  int64_t bytes_to_clear_;
  OperandParts lhs_;
  OperandParts rhs_;
  int* owners_;
  int* in_use_ = nullptr;
  bool owners_batched_;
};

namespace sm90 {

// Fills `workspace` with the owner of each row, the largest magnitude of each group, and the parts
// of the operands. This always takes a memory set and three kernels.
cudaError_t prepare(RaggedDotArguments const& arguments, RaggedWorkspace const& workspace,
                    cudaStream_t stream);

}  // namespace sm90

}  // namespace jgg
