// Keeps the clusters of a launch in step along K.
//
// Clusters that work on neighbouring tiles read the same rows and columns, and find them in L2 if
// they are at about the same step. All clusters begin together, but a tile of few rows takes half
// as long as a full tile, and its cluster is then half a tile ahead. Therefore no cluster begins a
// tile before all clusters have loaded their tiles of the turn before.
//
// Lockstep serves only speed. A cluster that has waited for as long as four tiles take does not
// wait again in this launch, because other kernels may hold part of the device, so that not all
// clusters run.
#pragma once

#include <cuda_runtime.h>

namespace jgg::sm90 {

// Lockstep pays for tiles of at least this many steps, in groups of more than this many rows on
// average. Shorter tiles lose more by waiting than they gain, and with few rows all clusters wait
// for memory.
constexpr int kLockstepSteps = 40, kLockstepRows = 256;

// The number of tiles that the thread blocks of all launches have loaded. The number only grows,
// and wraps around. Launches that run at the same time share it, so their blocks may wait too
// briefly. Each translation unit has its own number.
static __device__ unsigned loaded_tiles;

// The thread that loads has such an object. If `is_used` is false, it calls neither wait() nor
// arrive().
class Lockstep {
 public:
  // Blocks that begin at once have the same goal, because no block has loaded a tile yet when the
  // last block begins.
  __device__ explicit Lockstep(bool is_used) : goal_(is_used ? loaded() : 0) {}

  // Called before a tile of `steps` steps is loaded.
  __device__ void wait(int steps) {
    if (!is_patient_) return;
    unsigned const start = clock();
    while (static_cast<int>(loaded() - goal_) < 0) {
      if (static_cast<unsigned>(clock()) - start > steps * kPatience) {
        is_patient_ = false;
        return;
      }
    }
  }

  // Called after the loads of the tile are issued.
  __device__ void arrive() {
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(&loaded_tiles) : "memory");
    goal_ += gridDim.x;
  }

 private:
  // Cycles for each step of a tile, about four times as many as a step takes.
  static constexpr unsigned kPatience = 4096;

  __device__ static unsigned loaded() {
    unsigned count;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];"
                 : "=r"(count)
                 : "l"(&loaded_tiles)
                 : "memory");
    return count;
  }

  unsigned goal_;  // `loaded_tiles` when all blocks have loaded as many tiles as this one
  bool is_patient_ = true;
};

}  // namespace jgg::sm90
