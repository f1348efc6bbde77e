"""Inputs of the checks, as Hypothesis strategies and as tables of cases."""
