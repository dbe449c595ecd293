"""Decoding heads, trained on what a frozen target computes on text."""
