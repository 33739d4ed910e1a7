// Eight threads process a block of 128 columns, 16 columns each. All of a thread's loads are in
// flight before it computes, and results reuse the registers of the values that they are computed
// from.
#include "dispatch.h"
#include "mlp/hidden_octets.h"
#include "mlp/quantized_hidden.h"
#include "quantize/format.h"
#include "quantize/scale_rule.h"

namespace jgg::mlp {
namespace {

using quantize::convert_eight;
using quantize::kOctet;
using quantize::Octet;
using quantize::pack_pair;
using quantize::Scale;

using Source = __nv_bfloat16;

constexpr int kThreads = 256;
constexpr int kLanes = 8;  // threads to a block of columns
constexpr int kOctets = kScaleBlock / kOctet / kLanes;
constexpr int kBlocksPerCta = kThreads / kLanes;

// The places of a thread's octets.
struct Position {
  int row;
  int block;   // of columns
  int column;  // of the first octet; the others follow 64 columns apart

  __device__ __forceinline__ Position(int rows, int blocks) {
    unsigned const index = blockIdx.x * kBlocksPerCta + threadIdx.x / kLanes;
    row = static_cast<int>(index / blocks);
    block = static_cast<int>(index) - row * blocks;
    column = block * kScaleBlock + threadIdx.x % kLanes * kOctet;
    exists = row < rows;
  }
  bool exists;

  __device__ __forceinline__ static int ahead(int octet) { return octet * kLanes * kOctet; }
};

struct Block {
  Octet<Source> octet[kOctets];

  template <bool kAligned>
  __device__ __forceinline__ void load(Source const* from, int count) {
#pragma unroll
    for (int j = 0; j < kOctets; ++j) {
      octet[j] = Octet<Source>::template load<kAligned>(from + Position::ahead(j),
                                                        count - Position::ahead(j));
    }
  }

  template <bool kAligned>
  __device__ __forceinline__ void store(Source* to, int count) const {
#pragma unroll
    for (int j = 0; j < kOctets; ++j) {
      int const left = count - Position::ahead(j);
      Source* const at = to + Position::ahead(j);
      if constexpr (kAligned) {
        auto const& w = octet[j].word;
        if (left > 0) *reinterpret_cast<uint4*>(at) = make_uint4(w[0], w[1], w[2], w[3]);
      } else {
#pragma unroll
        for (int i = 0; i < kOctet; ++i) {
          if (i < left) at[i] = static_cast<Source>(octet[j][i]);
        }
      }
    }
  }

  // Quantises the block. All eight threads of the block call this.
  template <ElementType kFormat, bool kAligned>
  __device__ __forceinline__ void quantize(uint8_t* to, float* scale, int count, bool exists,
                                           bool power_of_two) {
    Scale const s = quantize::scale_of_octets<kFormat, kLanes>(octet, power_of_two);
#pragma unroll
    for (int j = 0; j < kOctets; ++j) {
      auto const scaled = [&](int e) { return octet[j][e] * s.inverse; };
      quantize::store_bytes<kAligned>(to + Position::ahead(j), convert_eight<kFormat>(scaled),
                                      count - Position::ahead(j));
    }
    if (threadIdx.x % kLanes == 0 && exists) *scale = s.scale;
  }
};

template <ElementType kFormat, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    quantize_hidden_kernel(QuantizedHidden arguments, GatedFunction function, bool power_of_two) {
  Projections const& p = arguments.projections;
  int const blocks = p.blocks(), pitch = p.pitch();
  Position const at(arguments.count ? min(p.rows, __ldg(arguments.count)) : p.rows, blocks);
  auto const* from = static_cast<Source const*>(p.data) + int64_t{2} * at.row * pitch + at.column;
  Block gate, up;
  // Weights are padded with zeros, so projections have zeros up to whole blocks.
  int const all = at.exists ? kScaleBlock : 0;
  gate.template load<true>(from, all);
  up.template load<true>(from + pitch, all);
  float const weight = at.exists ? __ldg(p.weights + at.row) : 0.0f;
  activate(function, gate.octet, up.octet, weight);
  int const count = at.exists ? p.columns - at.column : 0;
  int64_t const of_hidden = int64_t{1} * at.row * p.columns + at.column;
  gate.template quantize<kFormat, kAligned>(
      arguments.q + of_hidden, arguments.scale + int64_t{1} * at.row * blocks + at.block, count,
      at.exists, power_of_two);
}

template <ElementType kFormat, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    quantize_gradients_kernel(QuantizedGradients arguments, GatedFunction function,
                              bool power_of_two) {
  Projections const& p = arguments.projections;
  int const blocks = p.blocks(), pitch = p.pitch();
  Position const at(p.rows, blocks);
  int64_t const of_projections = int64_t{2} * at.row * pitch + at.column;
  int64_t const of_hidden = int64_t{1} * at.row * p.columns + at.column;
  auto const* from = static_cast<Source const*>(p.data) + of_projections;
  int const all = at.exists ? kScaleBlock : 0;
  int const count = at.exists ? p.columns - at.column : 0;
  Block gate, up, hidden;
  gate.template load<true>(from, all);
  up.template load<true>(from + pitch, all);
  hidden.template load<kAligned>(static_cast<Source const*>(arguments.dh) + of_hidden, count);
  float const weight = at.exists ? __ldg(p.weights + at.row) : 0.0f;

  float dweight = 0;
#pragma unroll
  for (int j = 0; j < kOctets; ++j) {
#pragma unroll
    for (int i = 0; i < kOctet; i += 2) {
      float dgate[2], dup[2], h[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        Gated const a = gated(function, gate.octet[j][i + e], up.octet[j][i + e]);
        float const dh = hidden.octet[j][i + e], weighted = dh * weight;
        float const unweighted = a.activation * a.up;
        dweight += dh * unweighted;
        dgate[e] = weighted * a.up * a.derivative;
        dup[e] = weighted * a.activation * a.up_slope;
        h[e] = unweighted * weight;
      }
      gate.octet[j].word[i / 2] = pack_pair<Source>(dgate[0], dgate[1]);
      up.octet[j].word[i / 2] = pack_pair<Source>(dup[0], dup[1]);
      hidden.octet[j].word[i / 2] = pack_pair<Source>(h[0], h[1]);
    }
  }
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    dweight += __shfl_xor_sync(~0u, dweight, distance);
  }
  if (threadIdx.x % kLanes == 0 && at.exists) {
    arguments.dweights[int64_t{1} * at.row * blocks + at.block] = dweight;
  }
  hidden.template store<kAligned>(static_cast<Source*>(arguments.hidden) + of_hidden, count);
  gate.template store<kAligned>(static_cast<Source*>(arguments.dgate) + of_hidden, count);
  up.template store<kAligned>(static_cast<Source*>(arguments.dup) + of_hidden, count);
  float* const scale = arguments.scale + int64_t{2} * at.row * blocks + at.block;
  uint8_t* const q = arguments.q + of_projections;
  gate.template quantize<kFormat, true>(q, scale, all, at.exists, power_of_two);
  up.template quantize<kFormat, true>(q + pitch, scale + blocks, all, at.exists, power_of_two);
}

// Calls `function` with the FP8 type, whether rows of hidden are whole octets, and the number of
// thread blocks.
template <class Function>
cudaError_t launch(QuantizedHiddenFormat format, Projections const& projections,
                   Function function) {
  int64_t const blocks = int64_t{1} * projections.rows * projections.blocks();
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  int const grid = static_cast<int>((blocks + kBlocksPerCta - 1) / kBlocksPerCta);
  return with_constants([&](auto fp8, auto aligned) { return function(fp8, aligned, grid); },
                        OneOf<ElementType::kE4m3, ElementType::kE5m2>{format.fp8},
                        Flag{projections.columns % kOctet == 0});
}

}  // namespace

cudaError_t quantize_hidden(QuantizedHiddenFormat format, QuantizedHidden const& arguments,
                            cudaStream_t stream) {
  GatedFunction const function(arguments.projections.activation);
  return launch(format, arguments.projections, [&](auto fp8, auto aligned, int grid) {
    quantize_hidden_kernel<fp8.value, aligned.value>
        <<<grid, kThreads, 0, stream>>>(arguments, function, format.power_of_two);
    return cudaGetLastError();
  });
}

cudaError_t quantize_gradients(QuantizedHiddenFormat format, QuantizedGradients const& arguments,
                               cudaStream_t stream) {
  GatedFunction const function(arguments.projections.activation);
  return launch(format, arguments.projections, [&](auto fp8, auto aligned, int grid) {
    quantize_gradients_kernel<fp8.value, aligned.value>
        <<<grid, kThreads, 0, stream>>>(arguments, function, format.power_of_two);
    return cudaGetLastError();
  });
}

}  // namespace jgg::mlp
