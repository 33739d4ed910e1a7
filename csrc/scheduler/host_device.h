// Lets one header compile for the device under nvcc and for the host under any C++17 compiler.
#pragma once

#ifdef __CUDACC__
#define JGG_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define JGG_HOST_DEVICE inline
#endif
