// Functions of kernels that may begin before the previous kernel of their stream has ended
// (`follows` of `launch_clusters`). Without such a launch these functions do nothing.
#pragma once

namespace jgg::sm90 {

// Lets the next kernel begin: once all blocks of this kernel have called this or ended, blocks of
// the next kernel start wherever there is room.
__device__ inline void let_next_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits until the previous kernel has ended and the calling thread sees what that kernel wrote.
__device__ inline void await_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace jgg::sm90
