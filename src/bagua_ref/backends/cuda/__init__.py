"""The CUDA backend: CUDA C++ sources, plans of their launches, and the launcher, which alone imports CuPy.

Nothing is imported here: `bagua_ref.backends` asks for the launcher when somebody asks for ``"cuda"``.
"""
