// Kernels that begin before the one before them in the stream ends: see `launch_clusters`. Without
// such a launch neither function does anything.
#pragma once

namespace jgg::sm90 {

// Once all blocks have called it or ended, the next kernel's blocks take the places that are free.
__device__ inline void let_next_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits until the kernel before has ended and the calling thread sees what it wrote.
__device__ inline void await_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace jgg::sm90
