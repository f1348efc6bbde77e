"""Training: hooks, bucketing and state broadcast behind ``with_bagua`` (S5)."""
