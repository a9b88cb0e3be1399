"""The paper's KFAC listings: programs for reading, which run and check themselves against the engine.

Start with `scaffold`. The engine, for any model and any size of data, is `kfs.factors`.
"""
