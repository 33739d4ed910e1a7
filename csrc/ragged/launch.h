// From run-time arguments to one compiled kernel, and its launch.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "ragged/ragged_dot.h"
#include "sm90/config_of.h"
#include "sm90/launch.h"
#include "sm90/mainloop/pingpong.h"
#include "sm90/roles.h"

namespace jgg::sm90 {

template <class Problem>
using DefaultMainloop = std::conditional_t<Problem::Config::kTakesTurns, PingpongMainloop<Problem>,
                                           CooperativeMainloop<Problem>>;

template <class Problem, class Loop = DefaultMainloop<Problem>, class Arguments>
cudaError_t launch(Arguments const& arguments, cudaStream_t stream) {
  using Config = typename Problem::Config;
  typename Problem::Params params;
  cudaError_t status = Problem::make_params(arguments, params);
  if (status != cudaSuccess) return status;

  return launch_persistent<Config>(persistent_kernel<WholeTileRoles<Problem, Loop>>, params,
                                   Problem::max_units(arguments), stream);
}

}  // namespace jgg::sm90
