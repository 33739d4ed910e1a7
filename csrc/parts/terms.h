// Products of float16 parts that make up a product of float32. No CUDA types.
#pragma once

#include "types.h"

namespace jgg::parts {

// low high', high low', high high', or only the last.
constexpr int kMostTerms = 3;

constexpr int terms_of(Accuracy accuracy) { return accuracy == Accuracy::kTf32 ? 1 : kMostTerms; }

// Parts of an operand.
constexpr int parts_of(Accuracy accuracy) { return accuracy == Accuracy::kTf32 ? 1 : 2; }

}  // namespace jgg::parts
