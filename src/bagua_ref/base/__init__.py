"""Foundations of all other modules: the current world, launch environments, memory, streams and
untrusted input.
"""
