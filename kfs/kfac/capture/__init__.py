"""Capture: seeing the operations of a forward pass that use tracked parameters.

What is exported here is the interface for applications that watch passes which somebody else makes.
"""

from kfs.kfac.capture.mode import Capture, forward
from kfs.kfac.capture.session import Session
from kfs.kfac.capture.tap import backward, pass_derived, send_back

__all__ = ["Capture", "Session", "backward", "forward", "pass_derived", "send_back"]
