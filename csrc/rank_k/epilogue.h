// The epilogue of symmetric results: scales, adds C, and stores a tile in blocks of 64 x 64. Each
// block goes to its place, and its transpose or zeros go to the mirrored place. As in the epilogue
// of the ragged products, a 16-bit result is packed and stored while the next tile is being
// multiplied.
#pragma once

#include <cutlass/numeric_conversion.h>

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "rank_k/rank_k.h"
#include "scheduler/warp.h"
#include "sm90/config.h"
#include "sm90/epilogue/scale_and_add.h"
#include "sm90/epilogue/subtile.h"
#include "sm90/fixup/exchange.h"

namespace jgg::sm90 {

template <class Problem>
class TriangularEpilogue {
  using Config = typename Problem::Config;
  using Output = typename Config::Output;
  using Params = typename Problem::Params;

  static constexpr bool kPacks = sizeof(Output) == 2;
  static constexpr int kBlock = kRowsPerConsumer;
  static constexpr int kBlocks = Config::kTileN / kBlock;
  static constexpr int kAccumulatorsPerBlock = kBlock * kBlock / kWarpgroup;
  // A block takes one subtile of shared memory, or two with half of its columns each.
  static constexpr int kSubtilesPerBlock = kBlock / Config::kSubtileColumns;
  static constexpr int kSlots = Config::kSubtileSlots / kSubtilesPerBlock;

 public:
  using Shared = ExchangingStorage<Config>;

  // One thread calls this before the other threads begin.
  __device__ static void initialize(Shared& shared) { initialize_exchange(shared.exchange); }

  __device__ TriangularEpilogue(Shared& shared, Params const& params, int consumer)
      : shared_(shared), params_(params), consumer_(consumer) {}

  // Prefetches the scales that take() will read, while the tile is still being multiplied.
  __device__ void prefetch(WorkTile const& work) const {
    if (!issues_stores()) return;
    auto const& descriptors = params_.descriptors[work.group];
    asm volatile("prefetch.global.L1 [%0];" ::"l"(&descriptors.alpha.at(work.batch)));
    asm volatile("prefetch.global.L1 [%0];" ::"l"(&descriptors.beta.at(work.batch)));
    if (!params_.adds_diagonal) return;
    asm volatile("prefetch.global.L1 [%0];" ::"l"(&descriptors.diagonal.at(work.batch)));
  }

  // Takes over the first blocks of a finished half tile. 32-bit results would take too many
  // registers until the next tile, so they are stored at once.
  template <class Accumulators>
  __device__ void take(Accumulators& accumulators, WorkTile const& work) {
    stack_ = work.group;
    matrix_ = work.batch;
    place_ = (work.m / kBlock + consumer_) << 16 | work.n / kBlock;
    if constexpr (Problem::kHalvesNarrow && count_of(Accumulators{}) == Config::kCluster) {
      if (work.partials > 0) {
        acquire_subtile<0>(consumer_);
        int const rank = work.first_step > 0 ? 1 : 0;
        auto sums = exchange_halves(shared_, consumer_, rank, exchanges_++ % 2, accumulators);
        place_ += rank;
        return take_blocks(sums);
      }
    }
    take_blocks(accumulators);
  }

  // Stores the block on the diagonal, if the half tile taken last has one that is not stored yet.
  // This cannot wait for the next tile, whose accumulators leave too few registers.
  __device__ void store_early() {
    if constexpr (kPacks) {
      int const block = (row() - column()) / kBlock;
      if (row() < column() || block >= steps_left_ / 2) return;
      acquire_slot();
      // All blocks share one copy of this code, because it is long.
      uint32_t packed[kAccumulatorsPerBlock / 2];
      with_block(block, packed_, [&](int any) {
#pragma unroll
        for (int i = 0; i < kAccumulatorsPerBlock / 2; ++i) {
          packed[i] = packed_[any * kAccumulatorsPerBlock / 2 + i];
        }
      });
      write_diagonal(packed);
      store_slot(row(), row());
    }
  }

  // Stores a block of the half tile taken last, or its mirror image, if any is left.
  __device__ void store_next() {
    if constexpr (kPacks) {
      if (steps_left_ > 0) store(--steps_left_, packed_);
    }
  }

  __device__ void store_rest() {
    while (steps_left_ > 0) store_next();
  }

  // Waits for all copies out of shared memory, which must outlive them.
  __device__ void wait() const { wait_for_stores(); }

 private:
  // Returns `value`, but keeps the compiler from holding it, or anything that follows from it, in a
  // register from tile to tile.
  __device__ static int recomputed(int value) {
    asm volatile("" : "+r"(value));
    return value;
  }
  __device__ static int lane() { return threadIdx.x % kWarpSize; }
  __device__ static int warp() { return threadIdx.x % kWarpgroup / kWarpSize; }

  __device__ int row() const { return static_cast<int>(place_ >> 16) * kBlock; }
  __device__ int column() const { return static_cast<int>(place_ & 0xffff) * kBlock; }
  __device__ int n() const { return params_.stacks[stack_].n; }

  __device__ bool is_computed(int row, int column) const {
    return params_.uplo == Uplo::kLower ? column <= row : row <= column;
  }

  __device__ Output* out_at(int row, int column) const {
    return params_.descriptors[stack_].out_data + offset(row, column);
  }

  // Returns the offset of an element of the matrix in its stack.
  __device__ int64_t offset(int row, int column) const {
    return (int64_t(matrix_) * n() + row) * n() + column;
  }

  template <class Accumulators>
  __device__ void take_blocks(Accumulators& accumulators) {
    constexpr int kTaken = decltype(cute::size(accumulators))::value / kAccumulatorsPerBlock;
    scale(accumulators);
    if constexpr (kPacks) {
      cutlass::NumericArrayConverter<Output, float, 2> const convert;
#pragma unroll
      for (int i = 0; i < kTaken * kAccumulatorsPerBlock / 2; ++i) {
        auto const pair = convert({accumulators(2 * i), accumulators(2 * i + 1)});
        packed_[i] = reinterpret_cast<uint32_t const&>(pair);
      }
      steps_left_ = 2 * kTaken;
    } else {
#pragma unroll
      for (int step = 0; step < 2 * kTaken; ++step) store(step, accumulators);
    }
  }

  template <class Accumulators>
  __device__ void scale(Accumulators& accumulators) const {
    auto const& descriptors = params_.descriptors[stack_];
    float const alpha = descriptors.alpha.at(matrix_);
    float const beta = params_.adds_c ? descriptors.beta.at(matrix_) : 0.0f;
    Output const* const c = descriptors.c_data + offset(row(), column());
    scale_and_add(accumulators, alpha, beta, c, n(), n() - row(), n() - column());
    if (params_.adds_diagonal) {
      add_on_diagonal(accumulators, descriptors.diagonal.at(matrix_), row() - column());
    }
  }

  // Step 2b stores block b of `values`, and step 2b + 1 stores its mirror image.
  template <class Values>
  __device__ void store(int step, Values const& values) {
    bool const mirror = step % 2 == 1;
    int const row = this->row(), column = this->column() + step / 2 * kBlock;
    if (!is_computed(row, column) || column >= n()) return;
    if (row == column && (mirror || kPacks)) return;
    if (mirror && params_.other == OtherTriangle::kKept) return;
    if (mirror && params_.other == OtherTriangle::kZero) return store_zeros(column, row);

    acquire_slot();
    with_block(step / 2, values,
               [&](int block) { mirror ? write_transposed(block, values) : write(block, values); });
    if (row == column) {
      sync_consumer(consumer_);
      complete_diagonal(row);
    }
    store_slot(mirror ? column : row, mirror ? row : column);
  }

  // Calls `write` with the number of block `any` as a constant, because the registers of a block
  // must be known at compile time.
  template <class Values, class Write>
  __device__ static void with_block(int any, Values const& values, Write write) {
#pragma unroll
    for (int block = 0; block < count_of(values); ++block) {
      if (block == any) write(block);
    }
  }

  // Stores a block of zeros from registers. This needs no slot and no barrier.
  __device__ void store_zeros(int first_row, int first_column) const {
    constexpr int kUnit = 16 / sizeof(Output), kUnits = kBlock * kBlock / kUnit / kWarpgroup;
    int const thread = recomputed(threadIdx.x % kWarpgroup);
    int const row = first_row + thread / (kBlock / kUnit);
    int const column = first_column + thread % (kBlock / kUnit) * kUnit;
    if (column >= n()) return;
    Output* to = out_at(row, column);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      constexpr int kRows = kBlock / kUnits;
      if (row + i * kRows < n()) *reinterpret_cast<uint4*>(to) = uint4{};
      to += int64_t(kRows) * n();
    }
  }

  // Return the number of blocks that the values' registers hold.
  __device__ static constexpr int count_of(uint32_t const*) { return kBlocks; }
  template <class Engine, class Layout>
  __device__ static constexpr int count_of(cute::Tensor<Engine, Layout> const&) {
    return decltype(cute::size(Layout{}))::value / kAccumulatorsPerBlock;
  }

  // Waits for the copy out of this slot, which was last used kSlots blocks ago.
  __device__ void acquire_slot() const { acquire_subtile<kSlots - 1>(consumer_); }

  __device__ void store_slot(int row, int column) {
    store_subtile(consumer_, [&] {
#pragma unroll
      for (int subtile = 0; subtile < kSubtilesPerBlock; ++subtile) {
        cute::SM90_TMA_STORE_3D::copy(&params_.descriptors[stack_].out,
                                      slot() + subtile * Config::kSubtileBytes,
                                      column + subtile * Config::kSubtileColumns, row, matrix_);
      }
    });
    slot_ = (slot_ + 1) % kSlots;
  }

  // Fills in the elements of a block on the diagonal that are not in the computed triangle. This
  // function is only for 32-bit results, because the instructions that transpose matrices take
  // 16-bit elements.
  __device__ void complete_diagonal(int first) const {
    constexpr int kUnit = 16 / sizeof(Output), kUnits = kBlock * kBlock / kUnit / kWarpgroup;
    using Vector = cutlass::AlignedArray<Output, kUnit>;
#pragma unroll 1
    for (int i = 0; i < kUnits; ++i) {
      auto const [row, column] = unit_at(i);
      Vector other;
      other.clear();
      if (params_.other == OtherTriangle::kKept && first + row < n() && first + column < n()) {
        other = *reinterpret_cast<Vector const*>(out_at(first + row, first + column));
      }
#pragma unroll
      for (int j = 0; j < kUnit; ++j) {
        if (is_computed(row, column + j)) continue;
        // Read only the computed triangle here, because threads are writing the other triangle.
        bool const mirrored = params_.other == OtherTriangle::kMirrored;
        at(row, column + j) = mirrored ? at(column + j, row) : other[j];
      }
    }
  }

  // Returns the row and column of this thread's i-th vector.
  __device__ static TriangleEntry unit_at(int i) {
    constexpr int kUnit = 16 / sizeof(Output);
    int const unit = i * kWarpgroup + threadIdx.x % kWarpgroup;
    return {unit / (kBlock / kUnit), unit % (kBlock / kUnit) * kUnit};
  }

  __device__ uint8_t* slot() const {
    return shared_.subtiles[consumer_][slot_ * kSubtilesPerBlock];
  }

  // Returns the address of an element of the block. The swizzle permutes 16-byte units of a row.
  __device__ uint8_t* address(int row, int column) const {
    constexpr int kUnit = 16 / sizeof(Output);
    int const subtile = column / Config::kSubtileColumns;
    int const unit = column % Config::kSubtileColumns / kUnit ^ row % 8;
    return slot() + subtile * Config::kSubtileBytes + row * kRowBytes + unit * 16 +
           column % kUnit * sizeof(Output);
  }

  __device__ Output& at(int row, int column) const {
    return *reinterpret_cast<Output*>(address(row, column));
  }

  // Writes a block with stmatrix, whose fragments are pairs of accumulators. An instruction writes
  // 16 rows by 16 columns as four matrices of 8 x 8: the upper left, lower left, upper right and
  // lower right one. Lane l gives the address of row l % 8 of matrix l / 8.
  __device__ void write(int block, uint32_t const* packed) const {
    // The swizzle is an exclusive or, so an exclusive or leads to the next 16 columns, and a single
    // register holds all addresses.
    uint8_t* const first = address(warp() * 16 + lane() % 16, lane() / 16 * 8);
#pragma unroll
    for (int pair = 0; pair < kBlock / 16; ++pair) {
      uint32_t const* source = packed + (block * kBlock / 16 + pair) * 4;
      auto const target = reinterpret_cast<uintptr_t>(first) ^ pair * 32;
      cute::SM90_U32x4_STSM_N::copy(source[0], source[1], source[2], source[3],
                                    *reinterpret_cast<cute::uint128_t*>(target));
    }
  }

  __device__ void write_transposed(int block, uint32_t const* packed) const {
    uint8_t* const first = address(lane() / 16 * 8 + lane() % 8, warp() * 16 + lane() / 8 % 2 * 8);
#pragma unroll
    for (int pair = 0; pair < kBlock / 16; ++pair) {
      uint32_t const* source = packed + (block * kBlock / 16 + pair) * 4;
      uint8_t* const target = first + pair * 16 * kRowBytes;
      cute::SM90_U16x8_STSM_T::copy(source[0], source[1], source[2], source[3],
                                    *reinterpret_cast<cute::uint128_t*>(target));
    }
  }

  template <class Accumulators>
  __device__ void write(int block, Accumulators const& accumulators) const {
#pragma unroll
    for (int i = 0; i < kAccumulatorsPerBlock; i += 2) {
      int const from = block * kAccumulatorsPerBlock + i;
      reinterpret_cast<float2&>(at(accumulator_row(i), accumulator_column(i))) =
          float2{accumulators(from), accumulators(from + 1)};
    }
  }

  template <class Accumulators>
  __device__ void write_transposed(int block, Accumulators const& accumulators) const {
#pragma unroll
    for (int i = 0; i < kAccumulatorsPerBlock; ++i) {
      at(accumulator_column(i), accumulator_row(i)) =
          accumulators(block * kAccumulatorsPerBlock + i);
    }
  }

  // Writes the block on the diagonal: the computed triangle, and its mirror image, zeros or C in
  // the other triangle. Each square of 16 x 16 is in one triangle or on the diagonal. In a square
  // on the diagonal, each square of 8 x 8 is in one triangle or on the diagonal.
  __device__ void write_diagonal(uint32_t const* packed) const {
    bool const lower = params_.uplo == Uplo::kLower;
    bool const mirrored = params_.other == OtherTriangle::kMirrored;
    int const thread = recomputed(threadIdx.x % kWarpgroup);
    int const lane = thread % kWarpSize, warp = thread / kWarpSize;
    int const row = lane / 4, column = lane % 4 * 2;
    uint32_t const left = (lower ? column <= row : row <= column) ? 0x0000ffff : 0;
    uint32_t const right = (lower ? column < row : row <= column + 1) ? 0xffff0000 : 0;
    uint32_t const computed[] = {left | right, lower ? ~0u : 0, lower ? 0 : ~0u, left | right};
#pragma unroll
    for (int pair = 0; pair < kBlock / 16; ++pair) {
      uint32_t const* source = packed + pair * 4;
      bool const on = pair == warp, inside = !on && (pair < warp) == lower;
      if (mirrored && !on && !inside) continue;
      uint32_t values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t other = 0;
        if (mirrored) {
          cute::SM75_U32x1_MOVM_T::copy(source[i == 1 ? 2 : i == 2 ? 1 : i], other);
        } else if (params_.other == OtherTriangle::kKept && !inside) {
          other = kept(warp * 16 + i % 2 * 8 + row, pair * 16 + i / 2 * 8 + column);
        }
        uint32_t const mask = on ? computed[i] : inside ? ~0u : 0;
        values[i] = (source[i] & mask) | (other & ~mask);
      }
      auto const target = address(warp * 16 + lane % 16, pair * 16 + lane / 16 * 8);
      cute::SM90_U32x4_STSM_N::copy(values[0], values[1], values[2], values[3],
                                    *reinterpret_cast<cute::uint128_t*>(target));
      if (mirrored && inside) {
        auto const image =
            address(pair * 16 + lane / 16 * 8 + lane % 8, warp * 16 + lane / 8 % 2 * 8);
        cute::SM90_U16x8_STSM_T::copy(values[0], values[1], values[2], values[3],
                                      *reinterpret_cast<cute::uint128_t*>(image));
      }
    }
  }

  // Returns two neighbours in a row of C in the block on the diagonal, or zeros past the matrix.
  __device__ uint32_t kept(int row, int column) const {
    row += this->row();
    column += this->row();
    return row < n() && column < n() ? *reinterpret_cast<uint32_t const*>(out_at(row, column)) : 0;
  }

  Shared& shared_;
  Params const& params_;
  int consumer_;
  int slot_ = 0;
  unsigned exchanges_ = 0;
  // Steps that are left of the half tile taken last. Each block is two steps: itself and its mirror
  // image.
  int steps_left_ = 0;
  int stack_;
  int matrix_;
  // The half tile's first row and column in blocks, in one register.
  uint32_t place_;
  uint32_t packed_[kPacks ? kBlocks * kAccumulatorsPerBlock / 2 : 1];
};

}  // namespace jgg::sm90
