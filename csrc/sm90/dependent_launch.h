// Kernels that may begin before the previous kernel of their stream has ended: the launch of such a
// kernel, and the functions that it calls. Without such a launch these functions do nothing.
// `launch_clusters` launches the kernels of `kernel.h` in the same way.
#pragma once

#include <cuda_runtime.h>

namespace jgg::sm90 {

// Lets the next kernel begin: once all blocks of this kernel have called this or ended, blocks of
// the next kernel start wherever there is room.
__device__ inline void let_next_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits until the previous kernel has ended and the calling thread sees what that kernel wrote.
__device__ inline void await_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Launches a kernel without shared memory of a size that is known at run time. If `follows`, it may
// begin while the previous kernel of the stream runs.
template <class... Parameters, class... Arguments>
cudaError_t launch_after(bool follows, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                         cudaStream_t stream, Arguments const&... arguments) {
  cudaLaunchAttribute early;
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch{};
  launch.gridDim = grid;
  launch.blockDim = block;
  launch.stream = stream;
  launch.attrs = &early;
  launch.numAttrs = follows;
  return cudaLaunchKernelEx(&launch, kernel, arguments...);
}

}  // namespace jgg::sm90
