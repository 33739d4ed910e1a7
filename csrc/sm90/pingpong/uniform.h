#pragma once

namespace jgg::sm90::pingpong {

// The same value, as far as the compiler can tell, in all threads of the warp: what follows from it,
// such as the descriptors of WGMMA operands, goes to uniform registers.
__device__ inline int uniform(int value) { return __shfl_sync(~0u, value, 0); }

}  // namespace jgg::sm90::pingpong
