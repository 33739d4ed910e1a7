# Every kernel that is a template of an element type: see cmake/Instances.cmake.

jgg_add_product(
  ragged_noncontracting
  NAMESPACE jgg
  ARGUMENTS RaggedDotArguments
  HEADER ragged/ragged_dot.h
)
jgg_add_instances(
  ragged_noncontracting noncontracting
  ARCH 90a
  NAMESPACE jgg::sm90
  HEADER ragged/noncontracting_launch.h
  TYPES kBf16 kF16
)
jgg_add_instances(
  ragged_noncontracting noncontracting_stream_k
  ARCH 90a
  NAMESPACE jgg::sm90
  HEADER ragged/stream_k_launch.h
  TYPES kBf16 kF16
  KINDS kStreamK
)
jgg_add_instances(
  ragged_noncontracting noncontracting_parts
  ARCH 90a
  NAMESPACE jgg::sm90
  HEADER ragged/parts_launch.h
  TYPES kF32
)
jgg_add_instances(
  ragged_noncontracting noncontracting_swapped
  ARCH 90a
  NAMESPACE jgg::sm90
  HEADER ragged/swapped_launch.h
  TYPES kF32
  KINDS kSwapped
)

jgg_add_product(
  ragged_contracting
  NAMESPACE jgg
  ARGUMENTS RaggedDotArguments
  HEADER ragged/ragged_dot.h
)
jgg_add_instances(
  ragged_contracting contracting
  ARCH 90a
  NAMESPACE jgg::sm90
  HEADER ragged/contracting_launch.h
  TYPES kBf16 kF16
  APART
  KINDS kCooperative kPingpong
)
jgg_add_instances(
  ragged_contracting contracting_parts
  ARCH 90a
  NAMESPACE jgg::sm90
  HEADER ragged/parts_launch.h
  TYPES kF32
)

# The float32 additions of FP8 kernels are paced (cmake/pace_additions.py): one instruction in
# ADDITIONS_PER_PAUSE pauses. Multiplications by scales between the additions count too.
jgg_add_product(
  scaled_ragged_noncontracting
  NAMESPACE jgg
  ARGUMENTS ScaledArguments
  HEADER scaled/scaled_ragged_dot.h
)
jgg_add_instances(
  scaled_ragged_noncontracting scaled_noncontracting
  ARCH 90a
  NAMESPACE jgg::sm90
  HEADER scaled/noncontracting_launch.h
  TYPES kE4m3 kE5m2
  ADDITIONS_PER_PAUSE 10
)
jgg_add_instances(
  scaled_ragged_noncontracting scaled_noncontracting_stream_k
  ARCH 90a
  NAMESPACE jgg::sm90
  HEADER scaled/stream_k_launch.h
  TYPES kE4m3 kE5m2
  KINDS kStreamK
  ADDITIONS_PER_PAUSE 10
)
jgg_add_instances(
  scaled_ragged_noncontracting scaled_noncontracting_swapped
  ARCH 90a
  NAMESPACE jgg::sm90
  HEADER scaled/swapped_launch.h
  TYPES kE4m3 kE5m2
  KINDS kSwapped
)

jgg_add_product(
  gathered_scaled_noncontracting
  NAMESPACE jgg
  ARGUMENTS ScaledArguments
  HEADER scaled/scaled_ragged_dot.h
)
jgg_add_instances(
  gathered_scaled_noncontracting scaled_gathered
  ARCH 90a
  NAMESPACE jgg::sm90
  HEADER scaled/noncontracting_launch.h
  TYPES kE4m3 kE5m2
  ADDITIONS_PER_PAUSE 10
)

jgg_add_product(
  channel_scaled_noncontracting
  NAMESPACE jgg
  ARGUMENTS ScaledArguments
  HEADER scaled/scaled_ragged_dot.h
)
jgg_add_instances(
  channel_scaled_noncontracting scaled_noncontracting_channels
  ARCH 90a
  NAMESPACE jgg::sm90
  HEADER scaled/channel_scaled_launch.h
  TYPES kE4m3 kE5m2
)
jgg_add_instances(
  channel_scaled_noncontracting cut_noncontracting_channels
  ARCH 90a
  NAMESPACE jgg::sm90
  HEADER scaled/stream_k_launch.h
  TYPES kE4m3 kE5m2
  KINDS kStreamK
)

jgg_add_product(
  scaled_ragged_contracting
  NAMESPACE jgg
  ARGUMENTS ScaledArguments
  HEADER scaled/scaled_ragged_dot.h
)
jgg_add_instances(
  scaled_ragged_contracting scaled_contracting
  ARCH 90a
  NAMESPACE jgg::sm90
  HEADER scaled/contracting_launch.h
  TYPES kE4m3 kE5m2
  ADDITIONS_PER_PAUSE 3
)
jgg_add_product(
  channel_scaled_contracting
  NAMESPACE jgg
  ARGUMENTS ScaledArguments
  HEADER scaled/scaled_ragged_dot.h
)
jgg_add_instances(
  channel_scaled_contracting scaled_contracting_channels
  ARCH 90a
  NAMESPACE jgg::sm90
  HEADER scaled/contracting_launch.h
  TYPES kE4m3 kE5m2
  ADDITIONS_PER_PAUSE 10
)

jgg_add_product(
  paired_scaled_contracting
  NAMESPACE jgg
  ARGUMENTS ScaledArguments
  HEADER scaled/scaled_ragged_dot.h
)
jgg_add_instances(
  paired_scaled_contracting scaled_contracting_pairs
  ARCH 90a
  NAMESPACE jgg::sm90
  HEADER scaled/contracting_launch.h
  TYPES kE4m3 kE5m2
  ADDITIONS_PER_PAUSE 10
)

jgg_add_product(
  grouped_gemm
  NAMESPACE jgg
  ARGUMENTS GroupedGemmArguments
  HEADER grouped/grouped_gemm.h
)
jgg_add_instances(
  grouped_gemm grouped_gemm_16bit
  ARCH 90a
  NAMESPACE jgg::sm90
  HEADER grouped/launch.h
  TYPES kBf16 kF16
  APART
)
jgg_add_instances(
  grouped_gemm grouped_gemm_parts
  ARCH 90a
  NAMESPACE jgg::sm90
  HEADER grouped/parts_launch.h
  TYPES kF32
)

jgg_add_product(
  rank_k
  NAMESPACE jgg
  ARGUMENTS RankKArguments
  HEADER rank_k/rank_k.h
)
jgg_add_instances(
  rank_k rank_k_16bit
  ARCH 90a
  NAMESPACE jgg::sm90
  HEADER rank_k/launch.h
  TYPES kBf16 kF16
  APART
  KINDS kCooperative kFine
)
jgg_add_instances(
  rank_k rank_k_parts
  ARCH 90a
  NAMESPACE jgg::sm90
  HEADER rank_k/parts_launch.h
  TYPES kF32
)

# Fused kernels of MLPs take only bfloat16. Layers in float16 consist of separate ragged products.
jgg_add_product(
  gated_ragged_dot
  NAMESPACE jgg::mlp
  ARGUMENTS GatedArguments
  HEADER mlp/gated_ragged_dot.h
)
jgg_add_instances(
  gated_ragged_dot gated
  ARCH 90a
  HEADER mlp/launch.h
  TYPES kBf16
)
jgg_add_instances(
  gated_ragged_dot few_rows
  ARCH 90a
  HEADER few_rows/launch.h
  TYPES kBf16
  KINDS kSwapped
)

jgg_add_product(
  activated_ragged_dot
  NAMESPACE jgg::mlp
  ARGUMENTS GatedArguments
  HEADER mlp/gated_ragged_dot.h
)
jgg_add_instances(
  activated_ragged_dot activated
  ARCH 90a
  HEADER mlp/launch.h
  TYPES kBf16
)

jgg_add_product(
  gated_gradient
  NAMESPACE jgg::mlp
  ARGUMENTS GradientArguments
  HEADER mlp/gated_ragged_dot.h
)
jgg_add_instances(
  gated_gradient gradient
  ARCH 90a
  HEADER mlp/launch.h
  TYPES kBf16
  KINDS kPingpong
)

jgg_add_product(
  paired_ragged_dot
  NAMESPACE jgg::mlp
  ARGUMENTS PairedArguments
  HEADER mlp/gated_ragged_dot.h
)
jgg_add_instances(
  paired_ragged_dot paired
  ARCH 90a
  HEADER mlp/launch.h
  TYPES kBf16
)

jgg_add_product(
  weight_gradients
  NAMESPACE jgg::mlp
  ARGUMENTS WeightGradientArguments
  HEADER mlp/gated_ragged_dot.h
)
jgg_add_instances(
  weight_gradients weight_gradients_of
  ARCH 90a
  HEADER mlp/weight_gradients_launch.h
  TYPES kBf16
)

jgg_add_product(
  gemm_fp64
  NAMESPACE jgg::fp64
  ARGUMENTS GemmArguments
  HEADER fp64/gemm.h
)
jgg_add_instances(
  gemm_fp64 fp64_gemm
  ARCH 90a
  HEADER fp64/gemm_launch.h
  TYPES kF64 kC64 kC128
)

jgg_add_product(
  rank_k_fp64
  NAMESPACE jgg::fp64
  ARGUMENTS RankKArguments
  HEADER fp64/rank_k.h
)
jgg_add_instances(
  rank_k_fp64 fp64_rank_k
  ARCH 90a
  HEADER fp64/rank_k_launch.h
  TYPES kF64 kC64 kC128
)
