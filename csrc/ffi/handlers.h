// The XLA FFI handlers of the extension.
#pragma once

#include "xla/ffi/api/c_api.h"

extern "C" {
XLA_FFI_Error* JggRaggedNoncontracting(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggRaggedContracting(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggRaggedAccumulate(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggGroupedGemm(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggGroupedGemmF32(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggGroupedGemmFp64(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggRankK(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggRankKF32(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggRankKFp64(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggQuantizeRows(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggQuantizeTokens(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggQuantizeBlocks(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggQuantizeJoined(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggQuantizeRagged(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggColumnMaxima(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggQuantizeGathered(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggQuantizeHidden(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggQuantizeGradients(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggQuantizeRaggedGradients(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggQuantizeJoinedGradients(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggAdamwQuantized(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggApplyAndQuantize(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggSortByExpert(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggGatherRows(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggDispatchRows(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggCombineRows(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggRowDots(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggScaledRaggedNoncontracting(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggGatheredScaledNoncontracting(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggScaledRaggedContracting(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggPairedScaledContracting(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggGatedRaggedDot(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggGatedRaggedDotTranspose(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggPairedRaggedDot(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggPairedWeightGradients(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggFewRowsDot(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggDecodeMlp(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggDecodePackedMlp(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggStreamedPackedDot(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggDecodedPackedDot(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggUnpackMatrices(XLA_FFI_CallFrame* call_frame);
}
