"""What the cache is made of: the format of values, servers and their life, failures, counters; users need `CachedDataset`."""
