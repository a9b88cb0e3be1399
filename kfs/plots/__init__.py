"""Figures: each file draws one figure when run. They need matplotlib: `pip install matplotlib`."""
