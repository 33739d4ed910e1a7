// Decodes packed codes to registers of two bfloat16. The registers are a thread's part of an
// operand of the tensor cores, which has 16 columns by 16 elements of K.
//
// The pipe of integer instructions limits the speed, because it takes one instruction in two
// cycles. Left shifts use a second pipe, and instructions on two bfloat16 at once use a third.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "packed/packed.h"

namespace jgg::packed {

using Fragment = uint32_t[4];  // of columns c, c + 8, c, c + 8; the last two at K + 8

__device__ __forceinline__ uint32_t multiply_two(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}
__device__ __forceinline__ uint32_t multiply_add_two(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}
__device__ __forceinline__ uint32_t subtract_two(uint32_t a, uint32_t b) {
  uint32_t difference;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
  return difference;
}

// Written with operators, this would be two instructions.
__device__ __forceinline__ uint32_t select(uint32_t mask, uint32_t a, uint32_t b) {
  uint32_t selected;
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(selected) : "r"(mask), "r"(a), "r"(b));
  return selected;
}

// Return a half of `x` twice. An instruction on two bfloat16 can read one half of an operand twice,
// so the compiler makes no instruction of these functions before a multiplication. It would make
// one of __byte_perm().
__device__ __forceinline__ uint32_t twice_low(uint32_t x) {
  __nv_bfloat162 const twice = __low2bfloat162(reinterpret_cast<__nv_bfloat162 const&>(x));
  return reinterpret_cast<uint32_t const&>(twice);
}
__device__ __forceinline__ uint32_t twice_high(uint32_t x) {
  __nv_bfloat162 const twice = __high2bfloat162(reinterpret_cast<__nv_bfloat162 const&>(x));
  return reinterpret_cast<uint32_t const&>(twice);
}

// Moves the eight e2m1 codes of a step to the bits of a bfloat16's sign, exponent and mantissa. The
// bfloat16 is then 2^-126 times the value of the code. Each of the words of two steps has the codes
// of three pairs, and both words together have the last pair of each step.
template <bool kIsSecond>
__device__ __forceinline__ void decode_e2m1(uint32_t first, uint32_t second, Fragment& a) {
  constexpr uint32_t kCode = 0x81C081C0;
  uint32_t const x = kIsSecond ? second : first;
  uint32_t const last = select(0xC180C180, second << 4, first << 2);
  a[0] = x & kCode;
  a[1] = (x << 6) & kCode;
  a[2] = __funnelshift_r(x, x, 6) & kCode;
  a[3] = (kIsSecond ? __funnelshift_r(last, last, 6) : last) & kCode;
}

// Moves pair i of a word's eight int4 codes to bits 4 to 7 of a bfloat16, which is then 2^-129
// times the code. Bit 7 is the lowest bit of the exponent, and numbers with an exponent of one
// continue the even spacing of subnormals.
__device__ __forceinline__ uint32_t move_int4(uint32_t x, int i) {
  return (i == 0 ? x << 4 : x >> 4 * (i - 1)) & 0x00F000F0;
}

// Decodes four numbers to 2^-6 times their values. Codes are numbers plus 128. A code in the low
// bits of a bfloat16 is 2^-133 times the code.
__device__ __forceinline__ void decode_int8(uint32_t x, uint32_t& first, uint32_t& second) {
  constexpr uint32_t kTwoTo127 = 0x7F007F00, kMinusTwo = 0xC000C000;
  first = multiply_add_two(x & 0x00FF00FF, kTwoTo127, kMinusTwo);
  second = multiply_add_two(x >> 8 & 0x00FF00FF, kTwoTo127, kMinusTwo);
}

// Moves four e4m3 numbers other than NaN to the bits of bfloat16, which are then 2^-120 times their
// values.
__device__ __forceinline__ void move_e4m3(uint32_t x, uint32_t& first, uint32_t& second) {
  constexpr uint32_t kCode = 0x87F087F0;
  first = x & kCode;
  // The second number's sign and last four bits are four places to the right of where a bfloat16
  // has them, and its other bits are four places to the left.
  second = select(0x80F080F0, x << 4, x >> 4) & kCode;
}

__device__ __forceinline__ void decode_e4m3(uint32_t x, uint32_t& first, uint32_t& second) {
  constexpr uint32_t kTwoTo120 = 0x7B807B80;
  move_e4m3(x, first, second);
  first = multiply_two(first, kTwoTo120);
  second = multiply_two(second, kTwoTo120);
}

// Records decode to the values of matrices divided by this factor. The epilogue multiplies sums by
// it.
constexpr float factor_of(Format format) {
  return is_int4(format) ? 0x1p69f : format == Format::kInt8 ? 0x1p6f : 1.0f;
}

// A thread's part of a record, which it decodes to operands for four times 16 elements of K.
// `values`, `scales` and `zeros` are those of consecutive records along K. `record` is the number
// of this record among them. `thread` is from 0 to 127.
template <Format kFormat>
class Record;

template <>
class Record<Format::kMxFp4> {
 public:
  static constexpr int kSlotBytes = 128;  // scales of a record
  static constexpr int kSlots = 1;        // the most slots of a record

  __device__ __forceinline__ Record(uint8_t const* values, uint8_t const* scales, uint8_t const*,
                                    int record, int thread, int) {
    words_ = *reinterpret_cast<uint4 const*>(values + record * 2048 + thread * 16);
    uint32_t const e =
        *reinterpret_cast<uint32_t const*>(scales + record * kSlotBytes + thread / 4 * 4);
    // The scales 2^(e - 127) of both groups, for each column.
    scales_[0] = (e << 7) & 0x7F807F80;
    scales_[1] = (e >> 1) & 0x7F807F80;
  }

  template <int kStep>
  __device__ __forceinline__ void decode(Fragment& a) const {
    uint32_t const words[] = {words_.x, words_.y, words_.z, words_.w};
    decode_e2m1<kStep % 2 == 1>(words[kStep / 2 * 2], words[kStep / 2 * 2 + 1], a);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t const scale = scales_[i % 2];
      a[i] = multiply_two(a[i], kStep < 2 ? twice_low(scale) : twice_high(scale));
    }
  }

 private:
  uint4 words_;
  uint32_t scales_[2];
};

// No bfloat16 is as large as 2^129. Scales are therefore multiplied by 2^60 only, and weights
// decode to 2^-69 times their values. They keep all bits of a bfloat16 if scales are at least 2^-57
// and less than 2^68.
template <Format kFormat>
class RecordOfInt4 {
 public:
  static constexpr int kSlotBytes =
      128;  // scales of a group; its zero points have half as many bytes
  static constexpr int kSlots = 2;

  __device__ __forceinline__ RecordOfInt4(uint8_t const* values, uint8_t const* scales,
                                          uint8_t const* zeros, int record, int thread,
                                          int group_shift) {
    constexpr uint32_t kTwoTo60 = 0x5D805D80, kMinusTwoToMinus126 = 0x80808080;
    words_ = *reinterpret_cast<uint4 const*>(values + record * 2048 + thread * 16);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const at = place_of_group(record, half, thread, group_shift);
      scales_[half] = multiply_two(*reinterpret_cast<uint32_t const*>(scales + at), kTwoTo60);
      if constexpr (kHasZeros) {
        uint32_t const zero = *reinterpret_cast<uint16_t const*>(zeros + at / 2);
        zeros_[half] = __byte_perm(zero << 4, 0, 0x4140);
      } else {
        zeros_[half] = multiply_two(scales_[half], kMinusTwoToMinus126);
      }
    }
  }

  // Returns where the scales of half a record are.
  __device__ __forceinline__ static int place_of_group(int record, int half, int thread,
                                                       int group_shift) {
    return ((2 * record + half) >> group_shift) * kSlotBytes + thread / 4 * 4;
  }

  // Rounds once. Zero points are subtracted first, because the product of a scale and a zero point
  // other than 8 would be rounded too.
  template <int kStep>
  __device__ __forceinline__ void decode(Fragment& a) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t const code = moved<kStep>(i);
      uint32_t const scale = of_column(scales_[kStep / 2], i % 2);
      uint32_t const zero = of_column(zeros_[kStep / 2], i % 2);
      a[i] = kHasZeros ? multiply_two(subtract_two(code, zero), scale)
                       : multiply_add_two(code, scale, zero);
    }
  }

  // Decodes to codes minus zero points, without scales.
  template <int kStep>
  __device__ __forceinline__ void decode_codes(Fragment& a) const {
    constexpr uint32_t kTwoTo127 = 0x7F007F00, kFour = 0x40804080, kMovedEight = 0x00800080;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t const zero = kHasZeros ? of_column(zeros_[kStep / 2], i % 2) : kMovedEight;
      a[i] = multiply_two(multiply_two(subtract_two(moved<kStep>(i), zero), kTwoTo127), kFour);
    }
  }

 private:
  static constexpr bool kHasZeros = kFormat == Format::kInt4Zeros;

  template <int kStep>
  __device__ __forceinline__ uint32_t moved(int i) const {
    uint32_t const words[] = {words_.x, words_.y, words_.z, words_.w};
    return move_int4(words[kStep], i);
  }

  __device__ __forceinline__ static uint32_t of_column(uint32_t pair, int column) {
    return column == 0 ? twice_low(pair) : twice_high(pair);
  }

  uint4 words_;
  // Pairs of columns c and c + 8, of each half of the record. `zeros_` has zero points as
  // move_int4() moves codes, or -8 times the scales.
  uint32_t scales_[2];
  uint32_t zeros_[2];
};

template <>
class Record<Format::kInt4> : public RecordOfInt4<Format::kInt4> {
  using RecordOfInt4::RecordOfInt4;
};
template <>
class Record<Format::kInt4Zeros> : public RecordOfInt4<Format::kInt4Zeros> {
  using RecordOfInt4::RecordOfInt4;
};

// A record of codes of 8 bits, without their scales.
template <Format kFormat>
class RecordOfBytes {
 public:
  static constexpr int kSlotBytes = 0;
  static constexpr int kSlots = 0;

  __device__ __forceinline__ RecordOfBytes(uint8_t const* values, uint8_t const*, uint8_t const*,
                                           int record, int thread, int) {
    uint8_t const* const at = values + record * 4096 + thread * 16;
    words_[0] = *reinterpret_cast<uint4 const*>(at);
    words_[1] = *reinterpret_cast<uint4 const*>(at + 2048);
  }

  template <int kStep>
  __device__ __forceinline__ void decode(Fragment& a) const {
    uint4 const two = words_[kStep / 2];
    decode_four(kStep % 2 ? two.z : two.x, a[0], a[1]);
    decode_four(kStep % 2 ? two.w : two.y, a[2], a[3]);
  }

 private:
  __device__ __forceinline__ static void decode_four(uint32_t x, uint32_t& first,
                                                     uint32_t& second) {
    if constexpr (kFormat == Format::kInt8) {
      decode_int8(x, first, second);
    } else if constexpr (kFormat == Format::kFp8) {
      decode_e4m3(x, first, second);
    } else {
      move_e4m3(x, first, second);
    }
  }

  uint4 words_[2];
};

template <>
class Record<Format::kInt8> : public RecordOfBytes<Format::kInt8> {
  using RecordOfBytes::RecordOfBytes;
};
template <>
class Record<Format::kFp8> : public RecordOfBytes<Format::kFp8> {
  using RecordOfBytes::RecordOfBytes;
};

template <>
class Record<Format::kFp8Blocks> : public RecordOfBytes<Format::kFp8Blocks> {
 public:
  static constexpr int kSlotBytes = sizeof(BlockScale);
  static constexpr int kSlots = 1;

  __device__ __forceinline__ Record(uint8_t const* values, uint8_t const* scales,
                                    uint8_t const* zeros, int record, int thread, int group_shift)
      : RecordOfBytes(values, scales, zeros, record, thread, group_shift) {
    BlockScale const scale = reinterpret_cast<BlockScale const*>(scales)[record];
    high_ = twice_high(__float_as_uint(scale.high));
    low_ = twice_high(__float_as_uint(scale.low));
  }

  // A product is rounded to bfloat16 about once, because the product with `low_` is small.
  template <int kStep>
  __device__ __forceinline__ void decode(Fragment& a) const {
    RecordOfBytes::decode<kStep>(a);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = multiply_add_two(a[i], high_, multiply_two(a[i], low_));
  }

 private:
  uint32_t high_;
  uint32_t low_;
};

}  // namespace jgg::packed
