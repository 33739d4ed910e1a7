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
  // Where the steps of one tile are dealt to several clusters: the first one of these; what becomes
  // of their sum, as in `Piece`; and where in the workspace that is handed over, or else where the
  // first of the sums to be added is, which the others follow.
  int first_step = 0;
  int partials = 0;
  int slot = 0;
};

}  // namespace jgg
