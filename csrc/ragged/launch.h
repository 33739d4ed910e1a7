// Launches a kernel of whole tiles.
#pragma once

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
cudaError_t launch_tiles(Arguments const& arguments, cudaStream_t stream) {
  return launch<WholeTileRoles<Problem, Loop>>(arguments, stream);
}

}  // namespace jgg::sm90
