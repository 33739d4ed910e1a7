// The Python module jax_grouped_gemm._extension: hands the XLA FFI handlers to Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include <utility>

#include "ffi/handlers.h"
#include "xla/ffi/api/c_api.h"

namespace jgg {
namespace {

namespace nb = nanobind;

nb::capsule encapsulate(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

// A target's name carries the version of its operands and attributes, so that an exported program
// never meets a handler that reads them differently.
nb::dict registrations() {
  nb::dict targets;
  targets["jax_grouped_gemm.ragged_noncontracting.v4"] = encapsulate(JggRaggedNoncontracting);
  targets["jax_grouped_gemm.ragged_contracting.v4"] = encapsulate(JggRaggedContracting);
  targets["jax_grouped_gemm.ragged_accumulate.v1"] = encapsulate(JggRaggedAccumulate);
  targets["jax_grouped_gemm.grouped_gemm.v1"] = encapsulate(JggGroupedGemm);
  targets["jax_grouped_gemm.grouped_gemm_f32.v1"] = encapsulate(JggGroupedGemmF32);
  targets["jax_grouped_gemm.grouped_gemm_fp64.v1"] = encapsulate(JggGroupedGemmFp64);
  targets["jax_grouped_gemm.rank_k.v3"] = encapsulate(JggRankK);
  targets["jax_grouped_gemm.rank_k_f32.v3"] = encapsulate(JggRankKF32);
  targets["jax_grouped_gemm.rank_k_fp64.v2"] = encapsulate(JggRankKFp64);
  targets["jax_grouped_gemm.quantize_rows.v1"] = encapsulate(JggQuantizeRows);
  targets["jax_grouped_gemm.quantize_tokens.v1"] = encapsulate(JggQuantizeTokens);
  targets["jax_grouped_gemm.quantize_blocks.v1"] = encapsulate(JggQuantizeBlocks);
  targets["jax_grouped_gemm.quantize_joined.v1"] = encapsulate(JggQuantizeJoined);
  targets["jax_grouped_gemm.quantize_ragged.v1"] = encapsulate(JggQuantizeRagged);
  targets["jax_grouped_gemm.column_maxima.v1"] = encapsulate(JggColumnMaxima);
  targets["jax_grouped_gemm.quantize_gathered.v2"] = encapsulate(JggQuantizeGathered);
  targets["jax_grouped_gemm.quantize_hidden.v1"] = encapsulate(JggQuantizeHidden);
  targets["jax_grouped_gemm.quantize_gradients.v1"] = encapsulate(JggQuantizeGradients);
  targets["jax_grouped_gemm.quantize_ragged_gradients.v1"] =
      encapsulate(JggQuantizeRaggedGradients);
  targets["jax_grouped_gemm.quantize_joined_gradients.v1"] =
      encapsulate(JggQuantizeJoinedGradients);
  targets["jax_grouped_gemm.adamw_quantized.v1"] = encapsulate(JggAdamwQuantized);
  targets["jax_grouped_gemm.apply_and_quantize.v1"] = encapsulate(JggApplyAndQuantize);
  targets["jax_grouped_gemm.sort_by_expert.v1"] = encapsulate(JggSortByExpert);
  targets["jax_grouped_gemm.gather_rows.v1"] = encapsulate(JggGatherRows);
  targets["jax_grouped_gemm.dispatch_rows.v1"] = encapsulate(JggDispatchRows);
  targets["jax_grouped_gemm.combine_rows.v1"] = encapsulate(JggCombineRows);
  targets["jax_grouped_gemm.row_dots.v1"] = encapsulate(JggRowDots);
  targets["jax_grouped_gemm.scaled_ragged_noncontracting.v5"] =
      encapsulate(JggScaledRaggedNoncontracting);
  targets["jax_grouped_gemm.scaled_ragged_contracting.v3"] =
      encapsulate(JggScaledRaggedContracting);
  targets["jax_grouped_gemm.gathered_scaled_noncontracting.v1"] =
      encapsulate(JggGatheredScaledNoncontracting);
  targets["jax_grouped_gemm.paired_scaled_contracting.v1"] =
      encapsulate(JggPairedScaledContracting);
  targets["jax_grouped_gemm.gated_ragged_dot.v3"] = encapsulate(JggGatedRaggedDot);
  targets["jax_grouped_gemm.gated_ragged_dot_transpose.v4"] =
      encapsulate(JggGatedRaggedDotTranspose);
  targets["jax_grouped_gemm.paired_ragged_dot.v2"] = encapsulate(JggPairedRaggedDot);
  targets["jax_grouped_gemm.paired_weight_gradients.v1"] = encapsulate(JggPairedWeightGradients);
  targets["jax_grouped_gemm.decode_mlp.v1"] = encapsulate(JggDecodeMlp);
  targets["jax_grouped_gemm.decode_packed_mlp.v1"] = encapsulate(JggDecodePackedMlp);
  targets["jax_grouped_gemm.few_rows_dot.v2"] = encapsulate(JggFewRowsDot);
  targets["jax_grouped_gemm.streamed_packed_dot.v1"] = encapsulate(JggStreamedPackedDot);
  targets["jax_grouped_gemm.decoded_packed_dot.v1"] = encapsulate(JggDecodedPackedDot);
  targets["jax_grouped_gemm.unpack_matrices.v1"] = encapsulate(JggUnpackMatrices);
  return targets;
}

// XLA refuses handlers with newer headers than its own, but then no backend initialises. So Python
// compares versions first, and its error says what is wrong.
std::pair<int, int> ffi_api_version() { return {XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR}; }

}  // namespace
}  // namespace jgg

NB_MODULE(_extension, module) {
  module.def("registrations", &jgg::registrations);
  module.def("ffi_api_version", &jgg::ffi_api_version);
}
