"""Formulas of the specification: pure functions without communication."""
