"""Readiness of tensors, and the background thread that runs complete buckets in order (S2.4 to
S2.6).
"""
