"""Formulas of the specification that need no communication: pure functions."""
