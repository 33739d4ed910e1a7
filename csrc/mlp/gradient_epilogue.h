// The epilogue of the gradient of hidden: computes the gradients of gate, of up and of a row's
// weight, and hidden itself, which is not kept from the forward pass.
//
// A consumer runs this epilogue while the other consumer multiplies. Gate and up arrive in shared
// memory by TMA, 64 rows by 32 columns at a time. The two gradients overwrite them, hidden has a
// place of its own, and all three leave by TMA.
#pragma once

#include "mlp/gated_epilogue.h"
#include "mlp/matrix_copies.h"

namespace jgg::mlp {

template <class Problem>
class GradientEpilogue {
  using Config = typename Problem::Config;
  using Params = typename Problem::Params;
  using Element = typename Config::Output;
  static_assert(sizeof(Element) == 2 && Config::kTakesTurns);

 public:
  static constexpr int kSubtileColumns = 32;
  static constexpr int kSubtileRowBytes = kSubtileColumns * sizeof(Element);

 private:
  static constexpr bool kHasUp = Problem::kHasUp;
  static constexpr int kHalves = Config::kTileM / kRowsPerConsumer;
  static constexpr int kSubtilesAHalf = Config::kTileN / kSubtileColumns;
  // 16 columns are one stmatrix, of which a thread has four registers.
  static constexpr int kParts = 2, kPackedAPart = 4;
  static constexpr int kPackedASubtile = kParts * kPackedAPart;
  static constexpr int kPacked = kHalves * kSubtilesAHalf * kPackedASubtile;
  // The number of subtiles in flight. Each of them has its own code, because the registers of a
  // subtile must be known at compile time.
  static constexpr int kSets = 2;
  static_assert(kSubtilesAHalf % kSets == 0);

  // Shared memory of a consumer, in place of the subtiles of other epilogues.
  struct Set {
    alignas(1024) uint8_t gate[kRowsPerConsumer * kSubtileRowBytes];
    uint8_t up[kRowsPerConsumer * kSubtileRowBytes];
    uint8_t hidden[kRowsPerConsumer * kSubtileRowBytes];
  };
  struct Storage {
    Set sets[kSets];
    float weights[Config::kTileM];
    alignas(8) sm90::Barrier loaded[kSets];
  };
  static_assert(sizeof(Storage) <= Config::kSubtileSlots * Config::kSubtileBytes);

 public:
  __device__ GradientEpilogue(sm90::SharedStorage<Config>& shared, Params const& params,
                              int consumer)
      : params_(params),
        storage_(reinterpret_cast<Storage&>(shared.subtiles[consumer])),
        consumer_(consumer),
        rounds_(0) {
    if (sm90::issues_stores()) {
      for (sm90::Barrier& loaded : storage_.loaded) loaded.init(1);
      sm90::fence_barriers();
    }
  }

  // Begins to load what the epilogue of a tile reads, while the tile is multiplied.
  __device__ void begin(WorkTile const& work) {
    at_ = Problem::store_at(params_, work, 0);
    rows_ = work.extent - work.m;
    subtiles_ = rows_ > kRowsPerConsumer ? kHalves * kSubtilesAHalf : kSubtilesAHalf;
    // Waits until all threads are done with the previous tile.
    sm90::acquire_subtile<0>(consumer_);
    if (work.k_tiles == 0) return;
    int const row = threadIdx.x % kWarpgroup;
    static_assert(Config::kTileM == kWarpgroup);
    if (params_.weights == nullptr) {
      storage_.weights[row] = 1.0f;
    } else {
      float const* const weights = params_.weights + work.begin + work.m;
      copy_or_zero(&storage_.weights[row], weights + row, row < rows_);
    }
    if (sm90::issues_stores()) {
      for (int subtile = 0; subtile < kSets; ++subtile) load(subtile);
    }
  }

  template <class Accumulators>
  __device__ void store(Accumulators const& accumulators) {
    uint32_t packed[kPacked];
#pragma unroll
    for (int i = 0; i < kPacked; ++i) {
      packed[i] = pack<Element>(accumulators(2 * i), accumulators(2 * i + 1));
    }
    wait_for_copies();
    sm90::sync_consumer(consumer_);
    float sums[2] = {};
#pragma unroll 1
    for (int subtile = 0; subtile < subtiles_; subtile += kSets) {
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
        store_subtile(subtile + set, storage_.sets[set], set, packed + set * kPackedASubtile, sums);
      }
      // The next subtiles move to the registers that the code above uses.
#pragma unroll
      for (int i = 0; i + kSets * kPackedASubtile < kPacked; ++i) {
        packed[i] = packed[i + kSets * kPackedASubtile];
      }
      ++rounds_;
      if ((subtile + kSets) % kSubtilesAHalf == 0) {
        store_sums(subtile / kSubtilesAHalf * kRowsPerConsumer, sums);
        sums[0] = sums[1] = 0.0f;
      }
    }
  }

  // Stores zeros as the gradients of unowned rows. Nothing of these rows is read.
  __device__ void store_zeros() {
    Set& set = storage_.sets[0];
    auto* const units = reinterpret_cast<uint4*>(set.gate);
    for (int i = threadIdx.x % kWarpgroup; i < int(sizeof(set.gate) / sizeof(uint4));
         i += kWarpgroup) {
      units[i] = {};
    }
    sm90::fence_async_proxy();
    sm90::sync_consumer(consumer_);
    for (int subtile = 0; subtile < subtiles_; ++subtile) {
      if (sm90::issues_stores()) issue(subtile, set.gate, set.gate, set.gate);
    }
    float const zeros[2] = {};
    for (int row = 0; row < kHalves * kRowsPerConsumer; row += kRowsPerConsumer) {
      store_sums(row, zeros);
    }
  }

  __device__ void wait() const { sm90::wait_for_stores(); }

 private:
  // Returns the place where a subtile is stored.
  __device__ sm90::StoreCoordinates place(int subtile) const {
    return {at_.column + subtile % kSubtilesAHalf * kSubtileColumns,
            at_.row + subtile / kSubtilesAHalf * kRowsPerConsumer, at_.outer};
  }

  __device__ void load(int subtile) {
    Set& set = storage_.sets[subtile % kSets];
    sm90::Barrier& loaded = storage_.loaded[subtile % kSets];
    loaded.arrive_and_expect_tx(sizeof(set.gate) + (kHasUp ? sizeof(set.up) : 0));
    load(params_.gate, set.gate, loaded, place(subtile));
    if constexpr (kHasUp) load(params_.up, set.up, loaded, place(subtile));
  }
  __device__ void load(CUtensorMap const& from, uint8_t* to, sm90::Barrier& loaded,
                       sm90::StoreCoordinates const& at) const {
    // Both stores and loads address a row relative to the end of its group, but this end has a
    // different coordinate in each. The hint is kNormal because neighbouring subtiles share lines
    // of memory. With kEvictFirst these lines were read several times, and the kernel took up to
    // 1.6 times as long.
    int const last = sm90::kRaggedRows, row = last - params_.store_shift + at.row;
    cute::SM90_TMA_LOAD_4D::copy(&from, loaded.address(),
                                 static_cast<uint64_t>(sm90::LoadHint::kNormal), to, at.column, row,
                                 last, at.outer);
  }

  __device__ void issue(int subtile, uint8_t const* dgate, uint8_t const* dup,
                        uint8_t const* hidden) const {
    sm90::StoreCoordinates const at = place(subtile);
    auto const store = [&](CUtensorMap const& to, uint8_t const* from) {
      sm90::store_box(to, from, at.column, at.row, at.outer, sm90::StoreHint::kNormal);
    };
    store(params_.dgate, dgate);
    if constexpr (kHasUp) store(params_.dup, dup);
    store(params_.hidden, hidden);
    cute::tma_store_arrive();
  }

  __device__ __forceinline__ void store_subtile(int subtile, Set& set, int number, uint32_t* packed,
                                                float (&sums)[2]) {
    int const thread = threadIdx.x % kWarpgroup;
    // Rows have 64 bytes. Their four vectors of 16 bytes are permuted as by TMA's swizzle of 64
    // bytes.
    int const row = thread / kWarpSize * 16 + thread % 16, half = thread % kWarpSize / 16;
    uint32_t const rows = cute::cast_smem_ptr_to_uint(set.gate) + row * kSubtileRowBytes;
    float const* const weights =
        storage_.weights + subtile / kSubtilesAHalf * kRowsPerConsumer + sm90::accumulator_row(0);
    float const weight[] = {weights[0], weights[8]};
    storage_.loaded[number].wait(rounds_ % 2);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      uint32_t const matrices = rows + ((2 * part + half) ^ (row / 2 % 4)) * 16;
      uint32_t* const hidden = packed + part * kPackedAPart;
      uint32_t gate[kPackedAPart], up[kPackedAPart];
      read_matrices<offsetof(Set, gate)>(matrices, gate);
      if constexpr (kHasUp) read_matrices<offsetof(Set, up)>(matrices, up);
#pragma unroll
      for (int i = 0; i < kPackedAPart; ++i) {
        differentiate(gate[i], up[i], hidden[i], weight[i % 2], sums[i % 2]);
      }
      write_matrices<offsetof(Set, gate)>(matrices, gate);
      if constexpr (kHasUp) write_matrices<offsetof(Set, up)>(matrices, up);
      write_matrices<offsetof(Set, hidden)>(matrices, hidden);
      // By now the previous subtile has been stored, and the next subtile can be loaded in its
      // place.
      if (part == 0 && sm90::issues_stores() && subtile > 0 && subtile + 1 < subtiles_) {
        cute::tma_store_wait<0>();
        load(subtile + 1);
      }
    }
    sm90::fence_async_proxy();
    sm90::sync_consumer(consumer_);
    if (sm90::issues_stores()) issue(subtile, set.gate, set.up, set.hidden);
  }

  // Turns gate and up of two columns of a row into their gradients, and the gradient of hidden into
  // hidden.
  __device__ __forceinline__ void differentiate(uint32_t& gate, uint32_t& up, uint32_t& hidden,
                                                float weight, float& sum) const {
    float2 const g = unpack<Element>(gate), d = unpack<Element>(hidden);
    float2 u{};
    if constexpr (kHasUp) u = unpack<Element>(up);
    float dgates[2], dups[2], products[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Gated a =
          gated<Problem::kIsPlain>(params_.activation, i == 0 ? g.x : g.y, i == 0 ? u.x : u.y);
      if constexpr (!kHasUp) a.up = 1.0f;
      float const product = a.activation * a.up, of_hidden = i == 0 ? d.x : d.y;
      float const weighted = of_hidden * weight;
      sum += of_hidden * product;
      products[i] = product * weight;
      dgates[i] = weighted * a.up * a.derivative;
      dups[i] = weighted * a.activation * a.up_slope;
    }
    hidden = pack<Element>(products[0], products[1]);
    gate = pack<Element>(dgates[0], dgates[1]);
    if constexpr (kHasUp) up = pack<Element>(dups[0], dups[1]);
  }

  // Stores the sums of rows. The four threads that have a row's columns add up their sums, always
  // in the same order.
  __device__ void store_sums(int first_row, float const (&sums)[2]) const {
    int64_t const first = int64_t(at_.column / Config::kTileN) * params_.rows + at_.outer +
                          at_.row - params_.store_shift;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = sums[half];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      int const row = first_row + sm90::accumulator_row(2 * half);
      // The second block of a cluster may have a tile that lies past the last column.
      if (threadIdx.x % 4 == 0 && row < rows_ && at_.column < params_.columns) {
        params_.dweights[first + row] = sum;
      }
    }
  }

  Params const& params_;
  Storage& storage_;
  int consumer_;
  int rounds_;  // of both sets, in all tiles so far
  // The current tile:
  sm90::StoreCoordinates at_;
  int rows_;      // rows from its first row to the end of its group
  int subtiles_;  // subtiles that have rows
};

}  // namespace jgg::mlp
