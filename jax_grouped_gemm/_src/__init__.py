"""The operations behind the public functions: a folder for each, with a file for each stage.

A call goes api -> primitive -> plan -> call. `api` checks arguments and brings them into one form,
JAX's transformations act on the primitive, `plan` chooses the kernel from static shapes, and a
custom call runs the kernel. `reference` is the same operation in pure JAX. `problem` describes the
operands for `plan` and `call`. `primitive` registers all of these with JAX.

All operations share the files of this folder: `arguments` and `arrays` (checks, sizes, mesh axes),
`counts` (operands that are too large for int32), `device` (the GPU and its rates), `extension` (the
compiled kernels, and devices that run them), `sizes` (the largest that kernels take), `op` and
`autodiff` (an operation and its rules under JAX's transformations), `meshes`, `partition`,
`lowering` and `over_tokens` (arrays that stay split over devices), `transfers` (traffic between
devices), `barrier` (the order in which XLA computes), `plan` and `explain`, `tile_choices` (tiles
that the user chooses), `invariance` (batch invariance), `fallback` (predicts where XLA's own
products are faster), `float32` (operands that are split into parts), `activations`, `version`.

A folder imports only from lower layers:

- `note` (choices that `explain` reports) imports from the files above,
- `quantized` (formats, and `weights` for operations that take them) imports from `note`,
- `ragged`, `rows` and `lists` import from `quantized`,
- `fp8` imports from `ragged`, and `muon` from `lists`,
- `mlp` imports from `ragged`, `rows` and `fp8`,
- `expert_parallel` imports from `mlp` and `rows`,
- `optimizer`, which writes FP8 weights as it updates the float32 weights, imports from `mlp`.

`fp8` has folders for its quantisers, for products of operands with scales and for the matmul that
quantises its operands. `choice` in it decides where bf16 replaces a recipe. In `ragged`, `packed`
is the product with packed weights. In `mlp`, `operands` has the types of a layer's operands,
`layer` the derivative, `fp8` the layer with a recipe, `packed` the layer with packed weights,
`decode` and `fp8/decode` layers of few tokens, and `experts` chooses between these layers.
"""
