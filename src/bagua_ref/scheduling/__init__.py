"""Who is ready, and the one background thread that runs ready buckets in order (S2.4 to S2.6)."""
