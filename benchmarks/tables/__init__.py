"""The tables and figures of the papers, made again with models that were trained here.

`python benchmarks/tables NAME` makes one; see README.md, and `registry` for what there is.
"""
