"""The training of encoder-decoders of four sizes on real tasks.

``python benchmarks/pair/seq2seq`` runs it; see `__main__`.
"""
