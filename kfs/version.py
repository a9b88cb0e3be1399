"""The library's version, below everything that writes it into files."""

__version__ = "0.2.0"
