// The epilogue of the gradient of hidden: the gradients of gate, of up and of a row's weight, and
// hidden itself, which is not kept from the forward pass.
//
// A tile is rounded and packed when it is done. While the next one is multiplied, it leaves in
// chunks of 32 columns: gate and up arrive in shared memory by TMA a chunk ahead, the gradients
// take their places there, hidden a place beside them, and all three leave by TMA.
#pragma once

#include "mlp/gated_epilogue.h"
#include "mlp/matrix_copies.h"

namespace jgg::mlp {

template <class Problem>
class GradientEpilogue {
  using Config = typename Problem::Config;
  using Params = typename Problem::Params;
  using Element = typename Config::Output;
  static_assert(sizeof(Element) == 2 && Config::kTileN == kGradientColumns);

  static constexpr int kPacked = kRowsPerConsumer * Config::kTileN / kWarpgroup / 2;

 public:
  static constexpr int kChunkColumns = 32;
  static constexpr int kChunkRowBytes = kChunkColumns * sizeof(Element);

 private:
  static constexpr int kChunks = Config::kTileN / kChunkColumns;
  // Columns of one stmatrix of four registers, of which a thread holds kPackedAPart.
  static constexpr int kPartColumns = 16;
  static constexpr int kParts = kChunkColumns / kPartColumns;
  static constexpr int kPackedAPart = 4;
  static_assert(kChunks * kParts * kPackedAPart == kPacked);
  // The last of a half tile wait in shared memory: there are no registers for them.
  static constexpr int kParked = 4, kKept = kPacked - kParked;
  // Steps of a chunk: its parts, and the loads of the next one.
  static constexpr int kStepsAChunk = kParts + 1;
  static constexpr int kSteps = kChunks * kStepsAChunk;
  static constexpr int kStored = kSteps + 1;  // the sums too
  // Chunks that have code of their own: registers must be known at compile time.
  static constexpr int kBodies = 2;

  // What a consumer has in shared memory, in place of the chunks of other epilogues.
  struct Storage {
    alignas(1024) uint8_t gate[kRowsPerConsumer * kChunkRowBytes];
    uint8_t up[kRowsPerConsumer * kChunkRowBytes];
    uint8_t hidden[kRowsPerConsumer * kChunkRowBytes];
    uint32_t parked[kParked][kWarpgroup];
    float sums[2][kWarpgroup];  // of each thread's two rows
    float weights[kRowsPerConsumer];
    // Of the half tile, for which there are no registers.
    sm90::StoreCoordinates place;
    int rows;       // that have gates and sums
    bool is_owned;  // by a local group
    alignas(8) sm90::Barrier loaded;
  };
  static_assert(sizeof(Storage) <= Config::kChunkSlots * Config::kChunkBytes);

 public:
  // The first steps of a tile release their stages early: one that is waited for is then the only
  // one under way, and is left alone if there are steps enough.
  __device__ static bool stores_in(int step, int steps) {
    int const first = min(max(steps - kSteps, 0), sm90::kFirstSteps);
    return step >= first && (steps < 2 * kSteps + sm90::kFirstSteps || step % 2 == 1);
  }

  __device__ GradientEpilogue(sm90::SharedStorage<Config>& shared, Params const& params,
                              int consumer)
      : params_(params),
        storage_(cute::cast_smem_ptr_to_uint(&shared.chunks[consumer])),
        next_(kStored) {
    if (issues()) {
      storage().loaded.init(1);
      cutlass::arch::fence_barrier_init();
    }
    sm90::sync_consumer(consumer);
  }

  // Nothing that was taken before is left to be stored.
  template <class Accumulators>
  __device__ void take(Accumulators const& accumulators, WorkTile const& work) {
    begin(work, true);
#pragma unroll
    for (int i = 0; i < kKept; ++i) packed_[i] = packed(accumulators, i);
#pragma unroll
    for (int i = 0; i < kParked; ++i) {
      storage().parked[i][thread()] = packed(accumulators, kKept + i);
    }
  }

  // Rows that no local group owns. Nothing is read of them, and all their gradients are zero: so is
  // what takes the places of gate and up, from the first chunk to the last.
  __device__ void take_zeros(WorkTile const& work) {
    begin(work, false);
    auto* const units = reinterpret_cast<uint4*>(storage().gate);
    constexpr int kUnits = 2 * kRowsPerConsumer * kChunkRowBytes / sizeof(uint4);
    for (int i = thread(); i < kUnits; i += kWarpgroup) units[i] = {};
#pragma unroll
    for (int i = 0; i < kKept; ++i) packed_[i] = 0;
#pragma unroll
    for (int i = 0; i < kParked; ++i) storage().parked[i][thread()] = 0;
  }

  __device__ void store_next() {
    if (next_ >= kSteps) return;
    // A body for each part of a few chunks, and the chunks that follow moved to their registers:
    // with one for each of all, the compiler serialises the products that are under way.
    int const body = next_ % (kBodies * kStepsAChunk);
#pragma unroll
    for (int chunk = 0; chunk < kBodies; ++chunk) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        if (body == chunk * kStepsAChunk + part) {
          store(part, packed_ + (chunk * kParts + part) * kPackedAPart);
        }
      }
      if (body == chunk * kStepsAChunk + kParts) load(next_ / kStepsAChunk + 1);
    }
    ++next_;
    if (body == kBodies * kStepsAChunk - 1) {
      constexpr int kMoved = kBodies * kParts * kPackedAPart;
#pragma unroll
      for (int i = 0; i + kMoved < kKept; ++i) packed_[i] = packed_[i + kMoved];
#pragma unroll
      for (int i = 0; i < kParked; ++i) {
        packed_[kKept - kMoved + i] = volatile_read(&storage().parked[i][thread()]);
      }
    }
  }

  // Sums wait until here: threads that exchange them must not do so while products are under way.
  __device__ void store_rest() {
    while (next_ < kSteps) store_next();
    if (next_ == kSteps) store_sums();
    next_ = kStored;
  }

  __device__ void wait() const {
    if (issues()) cute::tma_store_wait<0>();
  }

 private:
  // Everyone can read what is written here once the first chunk has been waited for.
  __device__ void begin(WorkTile const& work, bool is_owned) {
    // The tile before has been stored, and everyone is done with what is known of it.
    sm90::sync_consumer(consumer());
    int const first = consumer() * kRowsPerConsumer, row = thread();
    int const rows = work.extent - work.m - first;
    if (issues()) {
      storage().place = Problem::store_at(params_, work, first);
      storage().rows = rows;
      storage().is_owned = is_owned;
    }
    next_ = 0;
    storage().sums[0][row] = storage().sums[1][row] = 0.0f;
    if (row < kRowsPerConsumer) {
      float const* const weight = params_.weights + work.begin + work.m + first + row;
      if (is_owned && params_.weights == nullptr) {
        storage().weights[row] = 1.0f;
      } else {
        copy_or_zero(&storage().weights[row], weight, is_owned && row < rows);
      }
    }
    load(0);
  }

  template <class Accumulators>
  __device__ static uint32_t packed(Accumulators const& accumulators, int i) {
    return pack<Element>(accumulators(2 * i), accumulators(2 * i + 1));
  }

  // Of gate and up, and only of tiles that have any.
  __device__ void load(int chunk) {
    if (!issues()) return;
    cute::tma_store_wait<0>();
    if (chunk == kChunks) return;
    if (!storage().is_owned) {
      storage().loaded.arrive();
      return;
    }
    sm90::StoreCoordinates const at = storage().place;
    storage().loaded.arrive_and_expect_tx(2 * kRowsPerConsumer * kChunkRowBytes);
    load_chunk(params_.gate, storage().gate, at, chunk);
    load_chunk(params_.up, storage().up, at, chunk);
  }

  __device__ void load_chunk(CUtensorMap const& from, uint8_t* to, sm90::StoreCoordinates const& at,
                             int chunk) const {
    // Stores and loads count a group's rows from its end, each from another number.
    int const last = sm90::kRaggedRows, row = last - params_.store_shift + at.row;
    cute::SM90_TMA_LOAD_4D::copy(&from, storage().loaded.address(),
                                 static_cast<uint64_t>(sm90::LoadHint::kEvictFirst), to,
                                 at.column + chunk * kChunkColumns, row, last, at.outer);
  }

  // The thread's number in its block. What follows from it would be kept in registers from tile
  // to tile, of which there are none, if the compiler knew that it is always the same.
  __device__ static int thread_of_block() {
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
  }
  __device__ static int thread() { return thread_of_block() % kWarpgroup; }
  __device__ static int consumer() { return threadIdx.x / kWarpgroup - 1; }
  // The first of the two rows of the half tile that a thread has.
  __device__ static int row_of(int thread) { return thread / 32 * 16 + thread % 32 / 4; }

  __device__ Storage& storage() const {
    return *static_cast<Storage*>(__cvta_shared_to_generic(storage_));
  }

  __device__ static bool issues() { return threadIdx.x % kWarpgroup == 0; }

  // Part number `part` of the chunk that next_ is in.
  __device__ __forceinline__ void store(int part, uint32_t* packed) {
    int const chunk = next_ / kStepsAChunk;
    if (part == 0) {
      storage().loaded.wait(chunk % 2);
      if (chunk == 0) {
        wait_for_copies();
        sm90::sync_consumer(consumer());
      }
    }
    int const thread = GradientEpilogue::thread();
    // Rows of 64 bytes, whose four units are permuted as TMA's swizzle of 64 bytes has them.
    int const row = thread / kWarpSize * 16 + thread % 16;
    int const unit = (2 * part + thread % kWarpSize / 16) ^ (row / 2 % 4);
    uint32_t const matrices = storage_ + row * kChunkRowBytes + unit * 16;
    uint32_t gate[kPackedAPart], up[kPackedAPart];
    float weight[2];
    read_matrices<offsetof(Storage, gate)>(matrices, gate);
    read_matrices<offsetof(Storage, up)>(matrices, up);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      weight[half] = volatile_read(&storage().weights[row_of(thread) + 8 * half]);
    }
#pragma unroll
    for (int i = 0; i < kPackedAPart; ++i) {
      // Read late: there is no register for it before.
      float& sum = storage().sums[i % 2][thread];
      sum += differentiate(gate[i], up[i], packed[i], weight[i % 2]);
    }
    write_matrices<offsetof(Storage, gate)>(matrices, gate);
    write_matrices<offsetof(Storage, up)>(matrices, up);
    write_matrices<offsetof(Storage, hidden)>(matrices, packed);
    if (part == kParts - 1) {
      cute::tma_store_fence();
      sm90::sync_consumer(consumer());
      if (issues()) {
        sm90::StoreCoordinates at = storage().place;
        at.column += chunk * kChunkColumns;
        store_chunk(params_.dgate, storage().gate, at);
        store_chunk(params_.dup, storage().up, at);
        store_chunk(params_.hidden, storage().hidden, at);
        cute::tma_store_arrive();
      }
    }
  }

  // Of two columns of one row: gate and up become their gradients, the gradient of hidden becomes
  // hidden. Returns what they add to the gradient of the row's weight.
  __device__ __forceinline__ float differentiate(uint32_t& gate, uint32_t& up, uint32_t& hidden,
                                                 float weight) const {
    float sum = 0.0f;
    float2 const g = unpack<Element>(gate), u = unpack<Element>(up), d = unpack<Element>(hidden);
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
    gate = pack<Element>(dgates[0], dgates[1]);
    up = pack<Element>(dups[0], dups[1]);
    return sum;
  }

  __device__ static void store_chunk(CUtensorMap const& to, uint8_t const* from,
                                     sm90::StoreCoordinates const& at) {
    sm90::store_box(to, from, at.column, at.row, at.outer, sm90::StoreHint::kNormal);
  }

  // The four threads that have a row's columns add up what they have of them, always in one order.
  __device__ void store_sums() const {
    int const thread = GradientEpilogue::thread();
    sm90::StoreCoordinates const at = storage().place;
    int64_t const first = int64_t(at.column / Config::kTileN) * params_.rows + at.outer + at.row -
                          params_.store_shift;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = storage().sums[half][thread];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      int const row = row_of(thread) + 8 * half;
      // The second block of a cluster may have a tile that lies past the last column.
      if (thread % 4 == 0 && row < storage().rows && at.column < params_.columns) {
        params_.dweights[first + row] = sum;
      }
    }
  }

  Params const& params_;
  uint32_t storage_;  // an address in shared memory: a reference would take two registers
  int next_;          // step of the half tile taken last
  uint32_t packed_[kKept];
};

}  // namespace jgg::mlp
