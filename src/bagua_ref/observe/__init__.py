"""Measurements and records of training."""
