// The products of float16 parts (terms) whose sum is a product of float32 operands. This header
// uses no CUDA types.
#pragma once

#include "types.h"

namespace jgg::parts {

// The terms are low high', high low' and high high'. For kTf32 only the last term is computed.
constexpr int kMostTerms = 3;

constexpr int terms_of(Accuracy accuracy) { return accuracy == Accuracy::kTf32 ? 1 : kMostTerms; }

// Returns the number of parts of an operand.
constexpr int parts_of(Accuracy accuracy) { return accuracy == Accuracy::kTf32 ? 1 : 2; }

}  // namespace jgg::parts
