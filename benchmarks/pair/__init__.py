"""The training of the pair that ships with specdec_ext.

``python benchmarks/pair/train.py`` runs it; see `train`.
"""
