"""Serving engines on the operators of this package; each subpackage is loaded by its engine."""
