"""How the public functions work: a folder an operation, in it a file for each stage of a call.

A call goes api -> primitive -> plan -> call: arguments are checked and brought into one form, JAX's
transformations act on the primitive, a plan chooses the kernel from static shapes by a table of
choices, and one custom call runs it. `reference`, beside them, is the same operation in pure JAX,
and `problem` what plan and call know of the operands. They meet in `primitive`, where the
operation registers itself.

All operations share the files of this folder: `arguments` and `arrays` (checks, sizes,
mesh axes), `device` (the GPU and its rates), `extension` (the kernels, and where they run), `sizes`
(the largest that kernels take), `op` and `autodiff` (an operation and its rules under JAX's
transformations), `meshes`, `partition`, `lowering` and `over_tokens` (what operations and layers
keep split over devices), `transfers` (what travels between them), `barrier` (the order in which XLA
computes), `plan` and `explain`, `tile_choices` (tiles that are asked for), `invariance` (the bits
of a row depend on no other row), `fallback` (when XLA's own products are predicted to be faster),
`float32` (operands in parts), `activations`, `version`.

Folders stand on each other. `quantized` (formats, their registry `format`, and `weights`, how
operations take them) stands on the files above; `ragged`, `rows` and `lists` on `quantized`; `fp8`
on `ragged`; `muon` on `lists`; `mlp` on `ragged`, `rows` and `fp8`; `expert_parallel` on `mlp` and
`rows`; and `optimizer`, which writes FP8 weights as it updates them, on `mlp`.

`fp8` has a folder for its quantisers, for products of operands with scales, for the matmul of
operands that it quantises, and for the choice of bf16 in place of a recipe; they share the files
beside them. In `mlp`, `operands` has the types of a layer's operands, `layer` the derivative, `fp8`
the layer with a recipe, `packed` the layer of packed weights, and `experts` chooses between them.
No folder imports from one above it.
"""
