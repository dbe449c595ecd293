"""Drafters that are trained. Each module needs transformers (the extra ``hf``)."""
