"""Instruments of the checks: what an implementation is called with, watched by, and compared in."""
