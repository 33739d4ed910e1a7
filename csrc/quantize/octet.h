// Eight consecutive elements in registers: what a thread loads, and what it stores as FP8, at once.
#pragma once

#include "quantize/magnitude.h"

namespace jgg::quantize {

constexpr int kOctet = 8;

template <class Source>
struct Octet {
  using Words = Word<Source>;
  static constexpr int kWords = kOctet / Words::kElements;
  uint32_t word[kWords];

  // Reads the elements that exist, `count` at most, and zeros for the rest. `kAligned` says that
  // octets start at multiples of 16 bytes and are all there or not at all.
  template <bool kAligned>
  __device__ __forceinline__ static Octet load(Source const* from, int count) {
    Octet octet{};
    if constexpr (kAligned) {
      if (count > 0) {
#pragma unroll
        for (int i = 0; i < kWords; i += 4) {
          uint4 const part = __ldcs(reinterpret_cast<uint4 const*>(from) + i / 4);
          octet.word[i] = part.x, octet.word[i + 1] = part.y;
          octet.word[i + 2] = part.z, octet.word[i + 3] = part.w;
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        if (i < count) octet.word[i / Words::kElements] |= bits(from[i], i % Words::kElements);
      }
    }
    return octet;
  }

  __device__ __forceinline__ float operator[](int i) const {
    return Words::element(word[i / Words::kElements], i);
  }

  // The largest magnitude, in all elements of the word. Infinities, which the FP8 formats treat
  // each in its own way, become NaN, and NaN does not count.
  __device__ __forceinline__ uint32_t largest_after_poisoning() {
    uint32_t result = largest();
    if (Words::any_infinite(result)) {  // hardly ever
#pragma unroll
      for (uint32_t& w : word) w = Words::poison(w);
      result = largest();
    }
    return result;
  }

  // Infinities become NaN. Word by word: one branch around all of them would keep elements of 32
  // bits in local memory.
  __device__ __forceinline__ void poison() {
#pragma unroll
    for (uint32_t& w : word) {
      if (Words::any_infinite(Words::magnitude(w))) w = Words::poison(w);
    }
  }

  // The largest magnitude, in all elements of the word. NaN does not count.
  __device__ __forceinline__ uint32_t largest() const {
    uint32_t result = 0;
#pragma unroll
    for (uint32_t const w : word) result = Words::max(result, Words::magnitude(w));
    return Words::fold(result);
  }

  // Each element becomes the larger magnitude of itself and of the other's. Begin with zeros.
  __device__ __forceinline__ void raise(Octet const& other) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = Words::max(word[i], Words::magnitude(other.word[i]));
  }

  // Makes the compiler unpack the elements anew from here on. It would rather keep them all as
  // floats, in twice the registers.
  __device__ __forceinline__ void stay_packed() {
#pragma unroll
    for (uint32_t& w : word) asm volatile("" : "+r"(w));
  }

 private:
  __device__ __forceinline__ static uint32_t bits(Source x, int place) {
    if constexpr (sizeof(Source) == 4) {
      return __float_as_uint(x);
    } else {
      uint16_t half;
      memcpy(&half, &x, sizeof(half));
      return static_cast<uint32_t>(half) << (place * 16);
    }
  }
};

// Writes the first `count` of the bytes that `pieces` holds. `kAligned` says that pieces start at
// multiples of their size and are all there or not at all.
template <bool kAligned, class Pieces>
__device__ __forceinline__ void store_bytes(uint8_t* to, Pieces pieces, int count) {
  if constexpr (kAligned) {
    if (count > 0) *reinterpret_cast<Pieces*>(to) = pieces;
  } else {
    uint32_t words[sizeof(Pieces) / 4];
    memcpy(words, &pieces, sizeof(Pieces));
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Pieces)); ++i) {
      if (i < count) to[i] = static_cast<uint8_t>(words[i / 4] >> (i % 4 * 8));
    }
  }
}

}  // namespace jgg::quantize
