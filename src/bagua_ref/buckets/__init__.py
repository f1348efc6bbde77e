"""Registered tensors, their flat storage, and buckets of them."""
