"""A model of an sm_90 GPU, for machines that have none: everything it says is predicted.

``machine``
    The latencies, and what a GPU has: every constant, each with its source.
``ptx``
    Reads what nvcc writes.
``costs``
    How many machine instructions an instruction of PTX becomes, and how long its result takes.
``memory``
    Global memory, copied from this process as kernels touch it.
``semantics``
    What each instruction does, to many warps at once.
``simulation``
    Runs blocks of a launch, with a scoreboard: cycles, instructions, and where the cycles went.
``launches``
    The launches of an operator at its true shapes, from the host stand-in (csrc/testing).
``cases``
    The calls that are predicted.
``prediction``
    Microseconds from cycles, blocks, machine instructions and bytes.

Left out: queues of the memory system, misses of the constant caches, code that a multiprocessor
has already, or no longer, spilled registers that come back behind loads under way, bank conflicts,
and what blocks of one multiprocessor take from each other beyond issue slots and memory bandwidth.
Calls of the one H200 that was lent took up to 1.1 times as long for one request as the model says,
and 1.3 to 1.9 times for 32: the record gpu-predicted-2026-11-28-rests, of its first runs.
"""
