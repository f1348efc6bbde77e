"""Targets: the form that an implementation under test has, and the package's own parts in that form."""
