"""Internals of the cache: value format, servers, failures and counters. Users only need
`CachedDataset`.
"""
