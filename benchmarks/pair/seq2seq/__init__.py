"""Encoder-decoders of four sizes, trained on the data of benchmarks/tasks: see `__main__.py`."""
