"""kfs, KFAC from scratch: curvature matrices of neural networks and their Kronecker-factored approximations.

The definitions live in `kfs.basics`, one file each. Every file runs and checks itself.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
