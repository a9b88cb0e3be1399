"""Capture: one forward and one backward pass of a model, in which operations with tracked parameters are seen."""

from kfs.factors.capture.capture import Capture, forward
from kfs.factors.capture.row_queries import AuditResult
from kfs.factors.capture.tap import backward, measure_rows, pass_derived, send_back

__all__ = ["AuditResult", "Capture", "backward", "forward", "measure_rows", "pass_derived", "send_back"]
