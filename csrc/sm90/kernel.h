// The shell of every kernel with WGMMA and of the kernels of few_rows/ and packed/: barriers, a
// warpgroup that brings work and operands, one that may assist, and warpgroups that multiply.
//
//   warpgroup  warp  role             registers           what it does
//   0          0     Roles::load      kRegisters.load     one thread fills stages by TMA
//   0          1     Roles::schedule  kRegisters.load     fills the ring of work tiles
//   0          2, 3  Roles::bring     kRegisters.load     load what no tile's box can load:
//                                                         rows by their numbers (gather.h), scales
//                                                         and rows of tokens by cp.async, and rows
//                                                         that these warps quantise
//                                                         (mlp/quantizing_product.cu); also boxes
//                                                         of consecutive rows (packed/loads.h)
//   1          all   Roles::assist    kRegisters.assist   splits rows into parts, or is epilogue
//                                                         warps (packed/decoding.h); if missing,
//                                                         consumers are warpgroups 1 and 2
//   2, 3       all   Roles::consume   kRegisters.multiply products, fixup, epilogue
//
//   registers of a thread             load, multiply, assist
//     whole tiles                     40, 232
//     pieces of tiles                 56, 224
//     contracted rows by gather.h     56, 224
//     FP8 groups of few rows          40, 64 (three blocks a multiprocessor)
//     packed/decoding.h               56, 200, 56; 48, 96 with two blocks a multiprocessor
//     rows split into parts           40, 192, 88
//     few_rows/                       128 for every thread, as launched; two blocks
//     packed/streaming.h              80 for every thread, as launched; two blocks
//     mlp/quantizing_product.cu       80 for every thread, as launched; two blocks
//
//   barrier      arrivals that complete it
//   full         1 of the thread that loads, and the bytes of the stage (few_rows/, packed/: and
//                every thread that brings rows, or 1 if one thread brings them by TMA)
//   empty        each consumer (FP8, few_rows/, packed/: each of its warps) of each CTA of the
//                cluster, because a multicast fills the stage in all CTAs; where consumers take
//                turns, only the consumer whose tile it is
//   scales_full  every thread of the warps that load scales; in mlp/quantizing_product.cu each warp
//                that brings rows, with their scales
//   rows_full    each warp that splits rows; the weights of the stage have a barrier of their
//                own, weights_full, with the arrivals of full
//   work_full    1 of the warp that schedules
//   work_empty   each warp that loads or assists, and every warp of the consumers
//   ready, full of packed/rows_epilogue.h: each warp that assists, each warp of the consumers
//   free, full of fixup/exchange.h: 1 each, and the bytes of the sums
//
//   named barriers: barrier.h
//
// Kernels of fine tiles, with a block for each tile, have other warps (rank_k/fine_roles.h).
// Kernels of contracting products have two sets of roles (ragged/contracting_roles.h). Both have a
// `run` that does all the work of a block. The shell only launches it, with its threads and its
// shared memory.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "scheduler/warp.h"
#include "sm90/cluster.h"
#include "sm90/concepts.h"
#include "sm90/config.h"

namespace jgg::sm90 {

// Runs the role of each warp after barriers exist. `more` are further inputs of schedules.
template <class Role, class Params, class Shared, class... More>
__device__ __forceinline__ void run_roles(Params const& params, Shared& shared, int rank,
                                          More const&... more) {
  constexpr Registers kRegisters = Role::kRegisters;
  constexpr int kFirstConsumer = kRegisters.assist > 0 ? 2 : 1;
  // Make the warp index uniform; behind a divergent branch, shuffles would be duplicated.
  int const warp = uniform(threadIdx.x / kWarpSize), warpgroup = warp / (kWarpgroup / kWarpSize);
  if (warpgroup == 0) {
    if constexpr (kRegisters.load > 0) cutlass::arch::warpgroup_reg_dealloc<kRegisters.load>();
    if (warp == 0) {
      Role::load(params, shared, rank);
    } else if (warp == 1) {
      Role::schedule(params, shared, rank, more...);
    } else if constexpr (requires { Role::bring(params, shared, rank, warp); }) {
      Role::bring(params, shared, rank, warp - 2);
    }
  } else if (warpgroup < kFirstConsumer) {
    if constexpr (kRegisters.assist > 0) {
      cutlass::arch::warpgroup_reg_dealloc<kRegisters.assist>();
      Role::assist(params, shared);
    }
  } else {
    if constexpr (kRegisters.multiply > 0) {
      cutlass::arch::warpgroup_reg_alloc<kRegisters.multiply>();
    }
    Role::consume(params, shared, warpgroup - kFirstConsumer);
  }
}

template <Roles Role>
__global__ void __launch_bounds__(Role::kThreads, Role::kBlocks)
    persistent_kernel(const __grid_constant__ typename Role::Params params) {
  // Without this condition, the compiler's pass over host code would instantiate the body too and
  // drop it, which takes a tenth of the build time. The host needs only the name and parameters of
  // the kernel.
#ifdef __CUDA_ARCH__
  using Config = typename Role::Config;
  // The widest swizzle needs this alignment. If memory is aligned at run time instead, the compiler
  // uses generic addresses. These take more registers, and the additions of FP8 kernels then get
  // registers of one bank.
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  auto& shared = *reinterpret_cast<typename Role::Shared*>(dynamic_shared);
  int const rank = rank_in_cluster<Config>();

  if constexpr (requires { Role::run(params, shared, rank); }) {
    Role::run(params, shared, rank);
  } else {
    Role::initialize(params, shared);
    sync_cluster<Config>();
    run_roles<Role>(params, shared, rank);
    // A CTA's shared memory must outlive the arrivals and multicasts of its peer.
    if constexpr (Config::kCluster > 1) sync_cluster<Config>();
  }
#endif
}

}  // namespace jgg::sm90
