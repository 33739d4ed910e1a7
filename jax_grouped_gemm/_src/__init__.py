"""The operations behind the public functions: a folder for each, with a file for each stage.

A call goes api -> primitive -> plan -> call: `api` checks arguments and brings them into one form,
JAX's transformations act on the primitive, `plan` chooses the kernel from static shapes, and
one custom call runs it. `reference` is the same operation in pure JAX. `problem` describes the
operands for `plan` and `call`. The operation registers all of these in `primitive`.

All operations share the files of this folder: `arguments` and `arrays` (checks, sizes, mesh axes),
`counts` (what int32 does not count), `device` (the GPU and its rates), `extension` (the kernels,
and where they run), `sizes` (the largest that kernels take), `op` and `autodiff` (an operation and
its rules under JAX's transformations), `meshes`, `partition`, `lowering` and `over_tokens` (arrays
that stay split over devices), `transfers` (traffic between devices), `barrier` (the order in which
XLA computes), `plan` and `explain`, `tile_choices` (tiles that the user chooses), `invariance` (the
bits of a row depend on no other row), `fallback` (where XLA's own products are predicted to be
faster), `float32` (operands in parts), `activations`, `version`.

Folders import from lower folders only. `quantized` (formats, their registry `format`, and
`weights`, how operations take them) imports from the files above; `ragged`, `rows` and `lists`
from `quantized`; `fp8` from `ragged`; `muon` from `lists`; `mlp` from `ragged`, `rows` and `fp8`;
`expert_parallel` from `mlp` and `rows`; `optimizer`, which writes FP8 weights as it updates the
float32 weights, from `mlp`.

`fp8` has folders for its quantisers, for products of operands with scales, for the matmul that
quantises its operands, and for the choice of bf16 in place of a recipe. In `ragged`, `packed` is
the product by packed weights. In `mlp`, `operands` has the types of a layer's operands, `layer` the
derivative, `fp8` the layer with a recipe, `packed` the layer of packed weights, and `experts`
chooses between them.
"""
