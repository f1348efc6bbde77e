"""The stores of the cache: a key-value store, several used as one, and Redis."""
