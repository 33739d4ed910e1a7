#include "ragged/parts_workspace.h"

#include "parts/terms.h"

namespace jgg {
namespace {

constexpr int64_t kAlignment = 256;

}  // namespace

RaggedWorkspace::RaggedWorkspace(RaggedDotArguments const& a)
    : memory_(static_cast<uint8_t*>(a.workspace)), owners_batched_(a.groups.batched()) {
  // Scales belong to groups. If all batches share an operand, but its rows belong to other groups
  // in each batch, the operand therefore has parts for each batch.
  lhs_.batched = a.lhs_batched || owners_batched_;
  rhs_.batched = a.rhs_batched || (a.contracting && owners_batched_);
  int64_t const lhs_batches = lhs_.batched ? a.groups.batches : 1;
  int64_t const rhs_batches = rhs_.batched ? a.groups.batches : 1;
  lhs_.outer = lhs_batches;
  rhs_.outer = a.contracting ? rhs_batches : rhs_batches * a.groups.local_groups;

  lhs_.maxima = take<unsigned>(lhs_batches * a.groups.local_groups);
  rhs_.maxima = take<unsigned>(rhs_batches * a.groups.local_groups);
  if (!a.contracting) in_use_ = take<int>(rhs_.outer);
  bytes_to_clear_ = bytes_;
  owners_ = take<int>((owners_batched_ ? a.groups.batches : 1) * int64_t(a.groups.rows));
  take_parts(lhs_, lhs_.outer * a.groups.rows * a.k, a.accuracy);
  take_parts(rhs_, rhs_.outer * (a.contracting ? a.groups.rows : a.k) * a.n, a.accuracy);
}

template <class T>
T* RaggedWorkspace::take(int64_t count) {
  T* const start = reinterpret_cast<T*>(memory_ + bytes_);
  bytes_ += (count * int64_t(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
  return start;
}

void RaggedWorkspace::take_parts(OperandParts& operand, int64_t elements, Accuracy accuracy) {
  operand.part_stride = elements;
  operand.parts = take<uint16_t>(elements * parts::parts_of(accuracy));
}

}  // namespace jgg
