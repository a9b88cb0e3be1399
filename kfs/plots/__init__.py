"""Figures: one file each, which draws it when it runs. They need matplotlib: `pip install matplotlib`."""
