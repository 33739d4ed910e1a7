// An output tile of a CTA: everything that the producer, mainloop and epilogue need to know.
#pragma once

#include "scheduler/raster.h"

namespace jgg {

struct alignas(16) WorkTile {
  int batch;
  int group;   // local group: which rhs, or which matrix of the output
  int begin;   // first row of the group, rounded down to where a load can start
  int extent;  // rows from there to the group's end
  int head;    // rows from there that belong to the group before
  int m;       // element offset of the tile in the group's output
  int n;
  int k_tiles;  // steps of the mainloop; a tile without any is all zeros
  Share share;
  // The fields below are for tiles whose steps are dealt to several clusters.
  int first_step = 0;  // the first step of this cluster
  int partials = 0;    // how many sums to add, or kHandsOver, as in `Piece`
  int slot = 0;        // where the sum is handed over, or where the first of the sums to add is
};

}  // namespace jgg
