"""The CUDA backend: CUDA C++ sources, launch plans, and the launcher, the only module that imports
CuPy.

This module imports nothing: `bagua_ref.backends` imports the launcher when ``"cuda"`` is first
used.
"""
