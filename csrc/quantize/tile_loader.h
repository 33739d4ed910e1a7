// Loads neighbouring tiles of 128 x 128: one tile is loaded while another is quantised.
#pragma once

#include "quantize/tile.h"

namespace jgg::quantize {

// If there are registers for two CTAs on a multiprocessor, one loads while the other computes.
template <class Source, bool kAligned>
constexpr int kCtasPerProcessor = sizeof(Source) == 2 && kAligned ? 2 : 1;

// Visits neighbouring tiles in order. While one tile is quantised, the next is loaded.
template <class Source, bool kAligned>
class TileLoader {
 public:
  using Stagings = Staging<Source>[2];

  __device__ __forceinline__ TileLoader(Stagings& stagings, Source const* rows, int pitch,
                                        int num_rows, int first_column, int end_column)
      : stagings_(stagings),
        rows_(rows),
        pitch_(pitch),
        num_rows_(num_rows),
        column_(first_column),
        end_(end_column) {
    fetch();
  }

  __device__ __forceinline__ Patch<Source> next() {
    if constexpr (kAligned) {
      fetch();
      __pipeline_wait_prior(1);
      return stagings_[turn_].take();
    } else {
      Source const* tile = rows_ + column_;
      TileExtent const extent{num_rows_, end_ - column_};
      column_ += kScaleBlock;
      return Patch<Source>::template load<false>(tile, pitch_, extent);
    }
  }

 private:
  // Begins to load the next tile into the buffer whose tile was taken last.
  __device__ __forceinline__ void fetch() {
    if constexpr (kAligned) {
      stagings_[turn_].fetch(rows_ + column_, pitch_, {num_rows_, end_ - column_});
      __pipeline_commit();
      column_ += kScaleBlock;
      turn_ ^= 1;
    }
  }

  Stagings& stagings_;
  Source const* rows_;
  int pitch_;
  int num_rows_;
  int column_;  // of the tile to fetch next
  int end_;
  int turn_ = 0;
};

}  // namespace jgg::quantize
