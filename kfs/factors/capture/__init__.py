"""Captured passes: one forward and one backward pass of a model, whose uses of tracked parameters are accumulated."""

from kfs.factors.capture.captured_pass import CapturedPass, forward, hidden_uses
from kfs.factors.capture.tap import Phase
from kfs.factors.trace.discovery import Interception

__all__ = ["CapturedPass", "Interception", "Phase", "forward", "hidden_uses"]
