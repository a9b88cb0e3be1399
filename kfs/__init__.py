"""kfs, KFAC from scratch: curvature matrices of neural networks and their Kronecker-factored approximations.

The definitions live in `kfs.basics`, one file each. Every file runs and checks itself.
"""

from importlib.metadata import version

__version__ = version("kfs")

__all__ = ["__version__"]
