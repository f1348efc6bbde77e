"""The CUDA backend: CUDA C++ sources, plans of their launches, and the launcher, which alone
imports CuPy.

This module imports nothing: `bagua_ref.backends` imports the launcher when ``"cuda"`` is first
used.
"""
