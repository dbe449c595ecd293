"""Parts of the training of encoder-decoders of four sizes on the data of benchmarks/tasks.

`data.prepare`, `sizes.build_model` and `training.train` are called from Python; there is no command
yet, and no measurement of what was trained.
"""
