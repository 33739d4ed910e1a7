"""From a plan to one custom call: operands padded as it says, attributes, the result cut out."""

from jax_grouped_gemm.kernel_calls.grouped_gemm import grouped_gemm as grouped_gemm
from jax_grouped_gemm.kernel_calls.quantize import quantize as quantize
from jax_grouped_gemm.kernel_calls.ragged import accumulate as accumulate
from jax_grouped_gemm.kernel_calls.ragged import ragged as ragged
from jax_grouped_gemm.kernel_calls.ragged import scaled_contracting as scaled_contracting
from jax_grouped_gemm.kernel_calls.ragged import scaled_noncontracting as scaled_noncontracting
from jax_grouped_gemm.kernel_calls.rank_k import rank_k as rank_k
