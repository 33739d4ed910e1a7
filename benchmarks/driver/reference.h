// A simple product on the GPU, which checks randomly chosen elements of a result.
#pragma once

#include "device.h"

namespace driver {

enum class Element { kBf16, kFp8, kF32, kF64 };

__host__ __device__ inline double load(void const* data, Element type, int64_t i) {
  if (type == Element::kBf16) return __bfloat162float(static_cast<__nv_bfloat16 const*>(data)[i]);
  if (type == Element::kFp8) return float(static_cast<__nv_fp8_e4m3 const*>(data)[i]);
  if (type == Element::kF32) return static_cast<float const*>(data)[i];
  return static_cast<double const*>(data)[i];
}

// An operand. A line of lhs belongs to a row of the result, and a line of rhs to a column. at()
// returns one element of a line, the factor of a term, times the scale of the element's block.
struct Factor {
  void const* data;
  Element type;
  int64_t group_stride;
  int64_t line_stride;
  int64_t term_stride;
  float const* scales;  // or null
  int64_t scale_group_stride;
  int64_t scale_line_stride;
  int64_t scale_block_stride;
  int lines_per_scale;
  int64_t block_gap = 0;  // elements between a block of 128 terms of a line and the next block

  __host__ __device__ double at(int group, int line, int term) const {
    double const value = load(
        data, type,
        group * group_stride + line * line_stride + term * term_stride + term / 128 * block_gap);
    if (scales == nullptr) return value;
    return value * scales[group * scale_group_stride + line / lines_per_scale * scale_line_stride +
                          term / 128 * scale_block_stride];
  }
};

// The problem that a kernel was asked to compute.
struct Reference {
  Factor lhs;
  Factor rhs;
  void const* out;
  Element out_type;
  bool complex;  // only real parts are checked
  int groups;
  int rows;  // the result is [rows, columns], or [groups, rows, columns] if `stacked`
  int columns;
  int terms;
  bool stacked;
  bool triangular;         // elements above the diagonal are zero
  bool two_products;       // lhs rhs^T + rhs lhs^T
  int const* group_begin;  // [groups]: first term if `stacked`, else first row. Null: all terms
  int const* group_end;
  float const* added_to;     // the values that the product is added to, or null
  float accumulation_error;  // allowed, relative to the sum of the terms' magnitudes
};

struct Place {
  int group;
  int row;
  int column;
  int first_term;
  int last_term;
};

// Returns the random element that belongs to the number `sample`, and its terms. An element has no
// terms if no group owns its row, or if it is above the diagonal of a triangle.
__host__ __device__ inline Place choose(Reference const& r, uint64_t sample) {
  uint64_t const bits = hash(sample);
  Place place{};
  place.row = int((bits & 0xffffff) % r.rows);
  place.column = int((bits >> 24 & 0xffffff) % r.columns);
  place.last_term = r.triangular && place.column > place.row ? 0 : r.terms;
  if (r.stacked) {
    place.group = int((bits >> 48) % r.groups);
    if (r.group_begin != nullptr) {
      place.first_term = r.group_begin[place.group];
      place.last_term = r.group_end[place.group];
    }
    return place;
  }
  while (place.group < r.groups && r.group_end[place.group] <= place.row) ++place.group;
  if (place.group == r.groups) place.last_term = 0;
  return place;
}

__host__ __device__ inline double rounding(Element type) {
  return type == Element::kF64 ? 0x1p-52 : type == Element::kF32 ? 0x1p-23 : 0x1p-8;
}

// Returns the error of an element, divided by the error that rounding explains. `exact` is the sum
// of its terms, and `magnitude` the sum of their magnitudes. An element without terms that is added
// to nothing has to be exactly zero. The ratio of a NaN is infinite.
__host__ __device__ inline float error_ratio(Reference const& r, Place const& place, double exact,
                                             double magnitude) {
  int64_t const row = place.row + (r.stacked ? int64_t(place.group) * r.rows : 0);
  int64_t const element = row * r.columns + place.column;
  double const out = load(r.out, r.out_type, r.complex ? 2 * element : element);
  if (r.added_to != nullptr) {
    exact += r.added_to[element];
    magnitude += fabs(r.added_to[element]);
  }
  double const error = fabs(out - exact);
  if (error == 0) return 0;
  if (!(error < INFINITY)) return INFINITY;
  return error / (rounding(r.out_type) * fabs(exact) + r.accumulation_error * magnitude);
}

// Returns a term of the sum, which is one product or two, and its magnitude.
__host__ __device__ inline double2 term_and_magnitude(Reference const& r, Place const& p, int t) {
  double const term = r.lhs.at(p.group, p.row, t) * r.rhs.at(p.group, p.column, t);
  if (!r.two_products) return {term, fabs(term)};
  double const other = r.rhs.at(p.group, p.row, t) * r.lhs.at(p.group, p.column, t);
  return {term + other, fabs(term) + fabs(other)};
}

// A warp checks one element. `worst` becomes the largest ratio, as the bits of a float, because
// atomicMax() takes integers. The bits of non-negative floats have the order of the floats.
static __global__ void compare(Reference r, int samples, int* worst) {
  int const warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (warp >= samples) return;
  Place const place = choose(r, warp);
  double sum = 0, magnitude = 0;
  for (int t = place.first_term + lane; t < place.last_term; t += 32) {
    double2 const term = term_and_magnitude(r, place, t);
    sum += term.x;
    magnitude += term.y;
  }
  for (int step = 16; step > 0; step /= 2) {
    sum += __shfl_xor_sync(0xffffffff, sum, step);
    magnitude += __shfl_xor_sync(0xffffffff, magnitude, step);
  }
  if (lane == 0) atomicMax(worst, __float_as_int(error_ratio(r, place, sum, magnitude)));
}

// Returns the largest error_ratio() of `samples` elements, at most one if the result is right.
inline float worst_error(Reference const& reference, int samples) {
  auto const worst = allocate(sizeof(int));
  require(cudaMemset(worst.get(), 0, sizeof(int)), "cudaMemset");
  compare<<<(samples + 7) / 8, 256>>>(reference, samples, static_cast<int*>(worst.get()));
  float ratio = 0;
  require(cudaMemcpy(&ratio, worst.get(), sizeof(float), cudaMemcpyDeviceToHost), "compare");
  return ratio;
}

}  // namespace driver
