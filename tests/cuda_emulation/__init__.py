"""The CUDA sources on a CPU: compiled by g++ against a header of ours and run thread by thread, under the launcher's plans.

``emulation.h`` is what the sources see of CUDA, ``runtime.cpp`` runs grids, ``build`` compiles, ``backend`` is the kernel
backend ``cuda-emulated``, ``replay`` runs recorded launches in a program of their own, which the sanitizers need.
What this cannot show: speed, what the real compiler makes of the sources, and whether a card orders memory otherwise.
"""
