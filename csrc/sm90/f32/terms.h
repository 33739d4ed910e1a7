// Products of float16 parts that make up a product of float32. No CUDA types.
#pragma once

namespace jgg::sm90::f32 {

// low high', high low', high high', or only the last.
constexpr int kMostTerms = 3;

// Parts of an operand.
constexpr int parts_of(int terms) { return terms == 1 ? 1 : 2; }

}  // namespace jgg::sm90::f32
