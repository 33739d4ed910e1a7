// The epilogue of the gradient of hidden: the gradients of gate, of up and of a row's weight, and
// hidden itself, which is not kept from the forward pass.
//
// A tile is rounded and packed when it is done. While the next one is multiplied, it leaves in
// pieces of 16 columns: gate and up are read straight into the registers that need them, and the
// three results leave through shared memory, 32 columns at a time.
#pragma once

#include "mlp/gated_epilogue.h"

namespace jgg::mlp {

// Accesses by some threads without a branch: the compiler serialises products that are under way
// while threads part.
__device__ inline uint32_t load_if(bool condition, void const* from, uint32_t otherwise) {
  uint32_t value;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.s32 p, %2, 0;\n"
      "mov.b32 %0, %3;\n"
      "@p ld.global.b32 %0, [%1];\n"
      "}"
      : "=&r"(value)
      : "l"(from), "r"(int(condition)), "r"(otherwise));
  return value;
}
__device__ inline void store_if(bool condition, float* to, float value) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.s32 p, %1, 0;\n"
      "@p st.global.f32 [%0], %2;\n"
      "}" ::"l"(to),
      "r"(int(condition)), "f"(value)
      : "memory");
}

template <class Problem>
class GradientEpilogue {
  using Config = typename Problem::Config;
  using Params = typename Problem::Params;
  using Element = typename Config::Output;
  static_assert(sizeof(Element) == 2 && Config::kTileN == kGradientColumns);

  static constexpr int kPacked = kRowsPerConsumer * Config::kTileN / kWarpgroup / 2;
  static constexpr int kUnitColumns = 16;
  static constexpr int kUnits = Config::kTileN / kUnitColumns;
  static constexpr int kPackedAUnit = kPacked / kUnits;
  static_assert(kPackedAUnit == 4, "a stmatrix of four registers");
  static constexpr int kBodies = 4;

 public:
  static constexpr int kChunkColumns = 32;
  static constexpr int kChunkRowBytes = kChunkColumns * sizeof(Element);

 private:
  static constexpr int kUnitsAChunk = kChunkColumns / kUnitColumns;
  static constexpr int kChunkBytes = kRowsPerConsumer * kChunkRowBytes;
  // Behind the chunks, for each warp: where the half tile goes, for which there are no registers.
  static constexpr int kPlaceBytes = 16;
  static_assert(3 * kChunkBytes + kWarpgroup / kWarpSize * kPlaceBytes <=
                Config::kChunkSlots * Config::kChunkBytes);

 public:
  __device__ static bool stores_in(int step, int steps) { return steps < 32 || step % 2 == 1; }

  __device__ GradientEpilogue(sm90::SharedStorage<Config>& shared, Params const& params,
                              int consumer)
      : params_(params),
        chunks_(cute::cast_smem_ptr_to_uint(&shared.chunks[consumer][0][0])),
        next_(kUnits),
        rows_(0) {}

  // Nothing that was taken before is left to be stored.
  template <class Accumulators>
  __device__ void take(Accumulators const& accumulators, WorkTile const& work) {
    begin(work);
#pragma unroll
    for (int i = 0; i < kPacked; ++i) {
      packed_[i] = pack<Element>(accumulators(2 * i), accumulators(2 * i + 1));
    }
  }

  // Rows that no local group owns. Nothing is read of them, and all their gradients are zero.
  __device__ void take_zeros(WorkTile const& work) {
    begin(work);
    store_sums();
    rows_ = 0;
#pragma unroll
    for (int i = 0; i < kPacked; ++i) packed_[i] = 0;
  }

  __device__ void store_next() {
    if (next_ >= kUnits) return;
    // Registers must be known at compile time. One body for each of a few pieces, and those that
    // follow moved to their registers: with one for each of all, the compiler serialises products.
#pragma unroll
    for (int unit = 0; unit < kBodies; ++unit) {
      if (unit == next_ % kBodies) store(unit, packed_ + unit * kPackedAUnit);
    }
    ++next_;
    if (next_ % kBodies == 0) {
#pragma unroll
      for (int i = 0; i + kBodies * kPackedAUnit < kPacked; ++i) {
        packed_[i] = packed_[i + kBodies * kPackedAUnit];
      }
    }
  }

  // Sums wait until here: threads that exchange them must not do so while products are under way.
  __device__ void store_rest() {
    while (next_ < kUnits) store_next();
    store_sums();
    rows_ = 0;
  }

  __device__ void wait() const {
    if (issues()) cute::tma_store_wait<0>();
  }

 private:
  __device__ void begin(WorkTile const& work) {
    int const row = consumer() * kRowsPerConsumer;
    put(Problem::store_at(params_, work, row));
    next_ = 0;
    rows_ = work.extent - work.m - row;
    sum_[0] = sum_[1] = 0.0f;
  }

  // The thread's number in its warpgroup. What follows from it would be kept in registers from tile
  // to tile, of which there are none, if the compiler knew that it is always the same.
  __device__ static int thread() {
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index % kWarpgroup;
  }
  __device__ static int consumer() { return threadIdx.x / kWarpgroup - 1; }
  // The first of the two rows of the half tile that a thread has, and its first column of eight.
  __device__ static int row_of(int thread) { return thread / 32 * 16 + thread % 32 / 4; }
  __device__ static int column_of(int thread) { return thread % 4 * 2; }

  __device__ bool issues() const { return threadIdx.x % kWarpgroup == 0; }

  __device__ uint32_t place_address() const {
    return chunks_ + 3 * kChunkBytes + thread() / kWarpSize * kPlaceBytes;
  }
  __device__ void put(sm90::StoreCoordinates at) const {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, 0};" ::"r"(place_address()), "r"(at.column),
                 "r"(at.row), "r"(at.outer));
  }
  __device__ sm90::StoreCoordinates place() const {
    sm90::StoreCoordinates at;
    int unused;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(at.column), "=r"(at.row), "=r"(at.outer), "=r"(unused)
                 : "r"(place_address()));
    return at;
  }

  // Of a row of the half tile, the row in the arrays: `at` has the group's end and the distance.
  __device__ int row_in_arrays(sm90::StoreCoordinates const& at, int row) const {
    return at.outer + at.row - params_.store_shift + row;
  }

  // Piece next_, of which `unit` says whether it begins or ends a chunk.
  __device__ __forceinline__ void store(int unit, uint32_t const* packed) {
    int const part = unit % kUnitsAChunk;
    if (part == 0) {
      if (issues()) cute::tma_store_wait<0>();
      sm90::sync_warpgroup(1 + consumer());
    }
    int const thread = GradientEpilogue::thread();
    // Two values of each array are all that there are registers for.
#pragma unroll
    for (int eight = 0; eight < 2; ++eight) {
      uint32_t gate[2], up[2];
      float weight[2];
      sm90::StoreCoordinates const at = place();
      int const column = at.column + next_ * kUnitColumns + 8 * eight + column_of(thread);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        read(at, row_of(thread) + 8 * half, column, gate[half], up[half], weight[half]);
      }
      uint32_t dgate[2], dup[2], hidden[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        differentiate(packed[2 * eight + half], gate[half], up[half], weight[half], sum_[half],
                      dgate[half], dup[half], hidden[half]);
      }
      write(thread, 0, 2 * part + eight, dgate);
      write(thread, 1, 2 * part + eight, dup);
      write(thread, 2, 2 * part + eight, hidden);
    }
    if (part == kUnitsAChunk - 1) {
      cute::tma_store_fence();
      sm90::sync_warpgroup(1 + consumer());
      if (issues()) {
        sm90::StoreCoordinates at = place();
        at.column += next_ / kUnitsAChunk * kChunkColumns;
        store_chunk(params_.dgate, 0, at);
        store_chunk(params_.dup, 1, at);
        store_chunk(params_.hidden, 2, at);
        cute::tma_store_arrive();
      }
    }
  }

  // Gate and up of two columns of one row, and the row's weight; zeros outside the group and the
  // array. Rows are a multiple of 16 bytes: both columns are inside, or both outside.
  __device__ __forceinline__ void read(sm90::StoreCoordinates const& at, int row, int column,
                                       uint32_t& gate, uint32_t& up, float& weight) const {
    bool const inside = (row < rows_) & (column < params_.columns);
    row = row_in_arrays(at, row);
    int64_t const place = int64_t(row) * params_.columns + column;
    gate = load_if(inside, static_cast<Element const*>(params_.gate) + place, 0);
    up = load_if(inside, static_cast<Element const*>(params_.up) + place, 0);
    bool const weighted = inside & (params_.weights != nullptr);
    weight = __uint_as_float(load_if(weighted, params_.weights + row, __float_as_uint(1.0f)));
  }

  // Of two columns of one row, where `dh` is the gradient of hidden.
  __device__ __forceinline__ void differentiate(uint32_t dh, uint32_t gate, uint32_t up,
                                                float weight, float& sum, uint32_t& dgate,
                                                uint32_t& dup, uint32_t& hidden) const {
    float2 const d = unpack<Element>(dh), g = unpack<Element>(gate), u = unpack<Element>(up);
    float dgates[2], dups[2], products[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Gated const a = gated(params_.activation, i == 0 ? g.x : g.y, i == 0 ? u.x : u.y);
      float const product = a.activation * a.up, of_hidden = i == 0 ? d.x : d.y;
      float const weighted = of_hidden * weight;
      sum += of_hidden * product;
      products[i] = product * weight;
      dgates[i] = weighted * a.up * a.derivative;
      dups[i] = weighted * a.activation * a.up_slope;
    }
    hidden = pack<Element>(products[0], products[1]);
    dgate = pack<Element>(dgates[0], dgates[1]);
    dup = pack<Element>(dups[0], dups[1]);
  }

  // Unit `unit` of 16 bytes of the chunk of result number `which`: rows of 64 bytes, whose four
  // units are permuted as TMA's swizzle of 64 bytes has them. One stmatrix takes 16 rows of each
  // warp.
  __device__ void write(int thread, int which, int unit, uint32_t const* source) const {
    int const row = thread / kWarpSize * 16 + thread % 16;
    uint32_t const to =
        chunks_ + which * kChunkBytes + row * kChunkRowBytes + (unit ^ (row / 2 % 4)) * 16;
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(to),
                 "r"(source[0]), "r"(source[1])
                 : "memory");
  }

  __device__ void store_chunk(CUtensorMap const& to, int which,
                              sm90::StoreCoordinates const& at) const {
    sm90::store_box(to, chunks_ + which * kChunkBytes, at.column, at.row, at.outer,
                    sm90::StoreHint::kNormal);
  }

  // The four threads that have a row's columns add up what they have of them, always in one order.
  __device__ void store_sums() const {
    int const thread = GradientEpilogue::thread();
    sm90::StoreCoordinates const at = place();
    int64_t const column_tile = at.column / Config::kTileN;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = sum_[half];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      int const row = row_of(thread) + 8 * half;
      store_if((thread % 4 == 0) & (row < rows_),
               params_.dweights + column_tile * params_.rows + row_in_arrays(at, row), sum);
    }
  }

  Params const& params_;
  uint32_t chunks_;  // an address in shared memory
  int next_;         // piece of the half tile taken last; kUnits once all are stored
  int rows_;         // of the half tile that have gates and sums
  float sum_[2];
  uint32_t packed_[kPacked];
};

}  // namespace jgg::mlp
