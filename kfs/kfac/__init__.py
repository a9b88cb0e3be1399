"""The paper's KFAC listings: readable programs that run, and are checked by the engine.

Start with `scaffold`. The engine, for any model and any size of data, is `kfs.factors`.
"""
