# Every kernel that is a template of an element type: see cmake/Instances.cmake.

jgg_add_product(
  ragged_noncontracting
  NAMESPACE jgg::sm90
  ARGUMENTS RaggedDotArguments
  HEADER ragged/ragged_dot.h
)
jgg_add_instances(
  ragged_noncontracting noncontracting
  HEADER ragged/noncontracting_launch.h
  TYPES kBf16 kF16
)
jgg_add_instances(
  ragged_noncontracting noncontracting_stream_k
  HEADER ragged/stream_k_launch.h
  TYPES kBf16 kF16
  KINDS kStreamK
)
jgg_add_instances(
  ragged_noncontracting noncontracting_parts
  HEADER ragged/noncontracting_parts_launch.h
  TYPES kF32
)
jgg_add_instances(
  ragged_noncontracting noncontracting_swapped
  HEADER ragged/swapped_launch.h
  TYPES kF32
  KINDS kSwapped
)

jgg_add_product(
  ragged_contracting
  NAMESPACE jgg::sm90
  ARGUMENTS RaggedDotArguments
  HEADER ragged/ragged_dot.h
)
jgg_add_instances(
  ragged_contracting contracting
  HEADER ragged/contracting_launch.h
  TYPES kBf16 kF16
  APART
  KINDS kCooperative kPingpong
)
jgg_add_instances(
  ragged_contracting contracting_parts
  HEADER ragged/contracting_parts_launch.h
  TYPES kF32
)

# Their additions are paced: one in so many pauses, of products, and of those that scales are
# multiplied by before.
jgg_add_product(
  scaled_ragged_noncontracting
  NAMESPACE jgg::sm90
  ARGUMENTS ScaledArguments
  HEADER scaled/scaled_ragged_dot.h
)
jgg_add_instances(
  scaled_ragged_noncontracting scaled_noncontracting
  HEADER scaled/noncontracting_launch.h
  TYPES kE4m3 kE5m2
  ADDITIONS_PER_PAUSE 10
)
jgg_add_instances(
  scaled_ragged_noncontracting scaled_noncontracting_stream_k
  HEADER scaled/stream_k_launch.h
  TYPES kE4m3 kE5m2
  KINDS kStreamK
  ADDITIONS_PER_PAUSE 10
)
jgg_add_instances(
  scaled_ragged_noncontracting scaled_noncontracting_swapped
  HEADER scaled/swapped_launch.h
  TYPES kE4m3 kE5m2
  KINDS kSwapped
)

jgg_add_product(
  gathered_scaled_noncontracting
  NAMESPACE jgg::sm90
  ARGUMENTS ScaledArguments
  HEADER scaled/scaled_ragged_dot.h
)
jgg_add_instances(
  gathered_scaled_noncontracting scaled_gathered
  HEADER scaled/noncontracting_launch.h
  TYPES kE4m3 kE5m2
  ADDITIONS_PER_PAUSE 10
)

jgg_add_product(
  channel_scaled_noncontracting
  NAMESPACE jgg::sm90
  ARGUMENTS ScaledArguments
  HEADER scaled/scaled_ragged_dot.h
)
jgg_add_instances(
  channel_scaled_noncontracting scaled_noncontracting_channels
  HEADER scaled/channel_scaled_launch.h
  TYPES kE4m3 kE5m2
)
jgg_add_instances(
  channel_scaled_noncontracting cut_noncontracting_channels
  HEADER scaled/stream_k_launch.h
  TYPES kE4m3 kE5m2
  KINDS kStreamK
)

jgg_add_product(
  scaled_ragged_contracting
  NAMESPACE jgg::sm90
  ARGUMENTS ScaledArguments
  HEADER scaled/scaled_ragged_dot.h
)
jgg_add_instances(
  scaled_ragged_contracting scaled_contracting
  HEADER scaled/contracting_launch.h
  TYPES kE4m3 kE5m2
  ADDITIONS_PER_PAUSE 3
)
jgg_add_product(
  channel_scaled_contracting
  NAMESPACE jgg::sm90
  ARGUMENTS ScaledArguments
  HEADER scaled/scaled_ragged_dot.h
)
jgg_add_instances(
  channel_scaled_contracting scaled_contracting_channels
  HEADER scaled/contracting_launch.h
  TYPES kE4m3 kE5m2
  ADDITIONS_PER_PAUSE 10
)

jgg_add_product(
  paired_scaled_contracting
  NAMESPACE jgg::sm90
  ARGUMENTS ScaledArguments
  HEADER scaled/scaled_ragged_dot.h
)
jgg_add_instances(
  paired_scaled_contracting scaled_contracting_pairs
  HEADER scaled/contracting_launch.h
  TYPES kE4m3 kE5m2
  ADDITIONS_PER_PAUSE 10
)

jgg_add_product(
  grouped_gemm
  NAMESPACE jgg::sm90
  ARGUMENTS GroupedGemmArguments
  HEADER grouped/grouped_gemm.h
)
jgg_add_instances(
  grouped_gemm grouped_gemm_16bit
  HEADER grouped/launch.h
  TYPES kBf16 kF16
  APART
)
jgg_add_instances(
  grouped_gemm grouped_gemm_parts
  HEADER grouped/parts_launch.h
  TYPES kF32
)

jgg_add_product(
  rank_k
  NAMESPACE jgg::sm90
  ARGUMENTS RankKArguments
  HEADER rank_k/rank_k.h
)
jgg_add_instances(
  rank_k rank_k_16bit
  HEADER rank_k/launch.h
  TYPES kBf16 kF16
  APART
  KINDS kCooperative kFine
)
jgg_add_instances(
  rank_k rank_k_parts
  HEADER rank_k/parts_launch.h
  TYPES kF32
)

# Layers in float16 run composed of ragged products.
jgg_add_product(
  gated_ragged_dot
  NAMESPACE jgg::mlp
  ARGUMENTS GatedArguments
  HEADER mlp/gated_ragged_dot.h
)
jgg_add_instances(
  gated_ragged_dot gated
  HEADER mlp/launch.h
  TYPES kBf16
)
jgg_add_instances(
  gated_ragged_dot few_rows
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
  HEADER fp64/rank_k_launch.h
  TYPES kF64 kC64 kC128
)
