// Eight consecutive elements in registers. A thread loads an octet at once, and stores it as FP8 at
// once.
#pragma once

#include "quantize/magnitude.h"
#include "quantize/scale_rule.h"

namespace jgg::quantize {

constexpr int kOctet = 8;

template <class Source>
struct Octet {
  using Words = Word<Source>;
  static constexpr int kWords = kOctet / Words::kElements;
  uint32_t word[kWords];

  // Loads the first `count` elements, and sets the other elements to zero. With `kAligned`, octets
  // start at multiples of 16 bytes, and have either all elements or none.
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

  // Replaces infinities by NaN, because the two FP8 formats treat infinities differently. Returns a
  // word whose elements all are the largest magnitude. NaN does not count.
  __device__ __forceinline__ uint32_t largest_after_poisoning() {
    uint32_t result = largest();
    if (Words::any_infinite(result)) {  // hardly ever
#pragma unroll
      for (uint32_t& w : word) w = Words::poison(w);
      result = largest();
    }
    return result;
  }

  // Replaces infinities by NaN. Each word has its own branch, because with one branch around all
  // words the compiler would keep 32-bit elements in local memory.
  __device__ __forceinline__ void poison() {
#pragma unroll
    for (uint32_t& w : word) {
      if (Words::any_infinite(Words::magnitude(w))) w = Words::poison(w);
    }
  }

  // Returns a word whose elements all are the largest magnitude. NaN does not count.
  __device__ __forceinline__ uint32_t largest() const {
    uint32_t result = 0;
#pragma unroll
    for (uint32_t const w : word) result = Words::max(result, Words::magnitude(w));
    return Words::fold(result);
  }

  // Replaces each element by the magnitude of the other octet's element if that is larger. Elements
  // must not be negative, so begin with zeros.
  __device__ __forceinline__ void raise(Octet const& other) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = Words::max(word[i], Words::magnitude(other.word[i]));
  }

  // Makes the compiler unpack the elements again after this call. Otherwise it keeps all elements
  // as floats, which takes twice the registers.
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

// Computes the scale of octets that kLanes consecutive threads share. All of these threads call it.
// Replaces infinities by NaN.
template <ElementType kFormat, int kLanes, class Source, int kOctets>
__device__ __forceinline__ Scale scale_of_octets(Octet<Source> (&octets)[kOctets],
                                                 bool power_of_two) {
  uint32_t largest = 0;
#pragma unroll
  for (auto& octet : octets) {
    largest = Word<Source>::max(largest, octet.largest_after_poisoning());
    octet.stay_packed();
  }
  largest = Word<Source>::max_over(largest, kLanes);
  return scale_of<kFormat>(Word<Source>::element(largest, 0), power_of_two);
}

// Stores the first `count` bytes of `pieces`. With `kAligned`, pieces start at multiples of their
// size, and are stored as a whole or not at all.
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
