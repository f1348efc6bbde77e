"""Expected values: slow, obvious implementations that import nothing of the code under test."""
