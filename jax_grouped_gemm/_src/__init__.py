"""How the public functions work: a folder an operation, in it a file for each stage of a call.

A call goes api -> primitive -> plan -> call: arguments are checked and brought into one form, JAX's
transformations act on the primitive, a plan chooses the kernel from static shapes, and one custom
call runs it. `reference`, beside them, is the same operation in pure JAX. What all operations share
is in the files of this folder.
"""
