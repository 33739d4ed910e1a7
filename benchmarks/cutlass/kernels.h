// All kernels by name. Each translation unit has only one or two of them, so that several compilers
// can work at the same time.
#pragma once

#include <map>
#include <string>

#include "plan.h"

namespace jgg::peers {

using MakePlan = std::unique_ptr<Plan>(std::vector<Problem> const&);

MakePlan gemm_sm80_device, gemm_sm80_host;
MakePlan gemm_sm90_cooperative_nn, gemm_sm90_pingpong_nn;
MakePlan syr2k_f64_32x32, syr2k_f64_128x128, her2k_c128_64x64, her2k_c128_128x64;

inline std::map<std::string, MakePlan*> const& kernels() {
  static std::map<std::string, MakePlan*> const found = {
      {"gemm_sm80_device", gemm_sm80_device},
      {"gemm_sm80_host", gemm_sm80_host},
      {"gemm_sm90_cooperative_nn", gemm_sm90_cooperative_nn},
      {"gemm_sm90_pingpong_nn", gemm_sm90_pingpong_nn},
      {"syr2k_f64_32x32", syr2k_f64_32x32},
      {"syr2k_f64_128x128", syr2k_f64_128x128},
      {"her2k_c128_64x64", her2k_c128_64x64},
      {"her2k_c128_128x64", her2k_c128_128x64},
  };
  return found;
}

}  // namespace jgg::peers
