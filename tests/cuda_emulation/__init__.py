"""Emulation of CUDA on a CPU: the sources compiled by g++ against our own header and run thread by
thread.

``emulation.h`` stands in for CUDA's headers, ``runtime.cpp`` runs grids, ``build`` compiles,
``backend`` is the kernel backend ``cuda-emulated``, and ``replay`` runs recorded launches in a
separate program, which the sanitizers need. The emulation does not show speed, the real compiler's
output, or a card's ordering of memory.
"""
