"""The stores behind the cache: one key-value store, several as one, and Redis."""
