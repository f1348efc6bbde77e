"""Expected values: slow, obvious implementations that import nothing of what they judge."""
