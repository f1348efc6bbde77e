"""Measurements and records of a training."""
