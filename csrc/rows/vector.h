// Several consecutive elements of a row, and how threads share rows.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "rows/rows.h"

namespace jgg::rows {

constexpr int kVectorBytes = 16;
constexpr int kThreads = 256;

// A vector has 16 bytes if all rows begin at multiples of 16 bytes. Otherwise it has one element.
template <class T, bool kAligned>
struct Vector {
  static constexpr int kElements = kAligned ? kVectorBytes / sizeof(T) : 1;
  using Bits = std::conditional_t<kAligned, uint4,
                                  std::conditional_t<sizeof(T) == 2, unsigned short, unsigned>>;
  Bits bits;

  // Loads data that is read once.
  __device__ __forceinline__ static Vector load_once(T const* from) {
    return {__ldcs(reinterpret_cast<Bits const*>(from))};
  }
  __device__ __forceinline__ static Vector load(T const* from) {
    return {__ldg(reinterpret_cast<Bits const*>(from))};
  }

  __device__ __forceinline__ void store(T* to) const { *reinterpret_cast<Bits*>(to) = bits; }
  // Stores a part of results that are larger than the cache.
  __device__ __forceinline__ void store_streaming(T* to) const {
    __stcs(reinterpret_cast<Bits*>(to), bits);
  }

  __device__ __forceinline__ float operator[](int i) const {
    T elements[kElements];
    memcpy(elements, &bits, sizeof(bits));
    return static_cast<float>(elements[i]);
  }

  // Makes a vector of `element(i)`, rounded to nearest.
  template <class Element>
  __device__ __forceinline__ static Vector of(Element element) {
    T elements[kElements];
#pragma unroll
    for (int i = 0; i < kElements; ++i) elements[i] = static_cast<T>(element(i));
    Vector vector;
    memcpy(&vector.bits, elements, sizeof(vector.bits));
    return vector;
  }

  __device__ __forceinline__ Vector times(float factor) const {
    return of([&](int i) { return factor * (*this)[i]; });
  }
};

// Returns the number of valid rows, which come before all other rows.
__device__ __forceinline__ unsigned valid_rows(RowCount const& rows, int batch) {
  if (rows.count.data == nullptr) return rows.rows;
  return max(0, min(*rows.count.of(batch), rows.rows));
}

// How a block's threads share rows. `lanes` threads take consecutive vectors of the same row, one
// each. down() such sets of threads take adjacent rows or tokens.
struct Sharing {
  int lanes;
  int across;       // blocks that share a row
  bool row_by_row;  // blocks are numbered row by row, not column by column

  // Chooses the number of lanes, up to `widest`, that leaves the fewest lanes idle. If several
  // numbers do, chooses the largest.
  static Sharing of(int vectors, int widest, bool row_by_row) {
    int lanes = 1;
    while (lanes < vectors && lanes < 32) lanes *= 2;
    auto const across = [&](int lanes) { return (vectors + lanes - 1) / lanes; };
    for (int wider = 2 * lanes; wider <= widest; wider *= 2) {
      if (across(wider) * wider <= across(lanes) * lanes) lanes = wider;
    }
    return {lanes, across(lanes), row_by_row};
  }

  dim3 block() const { return dim3(lanes, kThreads / lanes); }
  int down() const { return kThreads / lanes; }

  dim3 grid(int64_t blocks_down, int batches) const {
    return dim3(static_cast<unsigned>(blocks_down * across), 1, batches);
  }
};

struct Place {
  int row;     // in units of the rows that a thread takes
  int vector;  // within the row

  __device__ __forceinline__ Place(Sharing const& sharing, unsigned block, unsigned blocks) {
    unsigned down, right;
    if (sharing.row_by_row) {
      down = block / sharing.across;
      right = block - down * sharing.across;
    } else {
      unsigned const blocks_down = blocks / sharing.across;
      right = block / blocks_down;
      down = block - right * blocks_down;
    }
    row = static_cast<int>(down * blockDim.y + threadIdx.y);
    vector = static_cast<int>(right * blockDim.x + threadIdx.x);
  }
};

template <class T>
struct Type {
  using type = T;
};

// Calls `function` with the element type and whether rows consist of vectors of 16 bytes.
template <class Function>
cudaError_t with_type(Shape const& shape, Function function) {
  auto const with_alignment = [&](auto type) {
    constexpr int kElements = kVectorBytes / sizeof(typename decltype(type)::type);
    return shape.columns % kElements == 0 ? function(type, std::true_type{})
                                          : function(type, std::false_type{});
  };
  switch (shape.type) {
    case ElementType::kBf16:
      return with_alignment(Type<__nv_bfloat16>{});
    case ElementType::kF16:
      return with_alignment(Type<__half>{});
    default:
      return with_alignment(Type<float>{});
  }
}

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace jgg::rows
