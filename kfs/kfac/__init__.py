"""The paper's KFAC listings, for reading: they run, and are checked against the engine.

Start with `scaffold`. The engine, for any model and any size of data, is `kfs.factors`.
"""
