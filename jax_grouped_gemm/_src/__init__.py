"""How the public functions work: a folder an operation, in it a file for each stage of a call.

A call goes api -> primitive -> plan -> call: arguments are checked and brought into one form, JAX's
transformations act on the primitive, a plan chooses the kernel from static shapes by a table of
choices, and one custom call runs it. `reference`, beside them, is the same operation in pure JAX,
and `problem` what plan and call know of the operands. They meet in `primitive`, where the
operation registers itself.

What all operations share is in the files of this folder: `arrays`, `arguments`, `device`, `op`,
`plan`, `sizes`. On those stand `ragged`, `rows` and `lists`, on the first `fp8`, on these three
`mlp`, on that and `rows` `expert_parallel`. No folder imports from one above it.
"""
