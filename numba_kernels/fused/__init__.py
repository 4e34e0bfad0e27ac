"""Kernels of a fused step, and the interpreter that calls them: many small ones, in one call.

A fused step is a table of instructions. ``interpreter`` walks it on several threads at once.
Nothing is compiled for a model: an instruction is the address of a compiled kernel and the address
of its argument block.

A kernel has the signature ``kernel.KERNEL``: (address of the argument block, number of the thread,
threads), does its share of the work, and allocates nothing. An argument block is a NamedTuple of
int64: addresses, sizes in elements, strides in bytes, float32 as their bits. The bytes that it
points to are read when the kernel runs, so that a table lives as long as its arrays.

Numbers are float32 inside of a fused step, if nothing else is said. Results do not depend on the
number of threads: threads take whole rows, and what is summed is summed in one order.

Like all of ``numba_kernels``: knows no ONNX, and checks nothing that its caller can know.
"""
