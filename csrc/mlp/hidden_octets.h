// The hidden layer of octets, for kernels that quantise it.
#pragma once

#include "mlp/activation.h"
#include "quantize/octet.h"

namespace jgg::mlp {

// Computes hidden = weight activation(gate) up in place of gate, rounded to the octets' type.
template <class Source, int kOctets>
__device__ __forceinline__ void activate(GatedFunction const& function,
                                         quantize::Octet<Source> (&gate)[kOctets],
                                         quantize::Octet<Source> const (&up)[kOctets],
                                         float weight) {
#pragma unroll
  for (int j = 0; j < kOctets; ++j) {
#pragma unroll
    for (int i = 0; i < quantize::kOctet; i += 2) {
      Gated const a = gated(function, gate[j][i], up[j][i]);
      Gated const b = gated(function, gate[j][i + 1], up[j][i + 1]);
      gate[j].word[i / 2] =
          quantize::pack_pair<Source>(a.activation * a.up * weight, b.activation * b.up * weight);
    }
  }
}

}  // namespace jgg::mlp
