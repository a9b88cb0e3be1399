"""Capture: one forward and one backward pass of a model, in which operations with tracked parameters are seen."""

from kfs.factors.capture.mode import Capture, forward, recorder_for
from kfs.factors.capture.sites import Known
from kfs.factors.capture.tap import backward, measure_rows, pass_derived, send_back

__all__ = ["Capture", "Known", "backward", "forward", "measure_rows", "pass_derived", "recorder_for", "send_back"]
