"""Every model family of transformers that can be built small, in every way of running.

``python benchmarks/families`` runs it; see `__main__`.
"""
