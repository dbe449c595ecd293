"""The proof on a machine with a GPU, and what is timed there.

``python benchmarks/gpu/report.py`` runs it; see `report`.
"""
