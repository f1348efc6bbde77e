"""Targets: the interface of an implementation under test, and the package's own parts behind that
interface.
"""
