"""Capture: seeing the operations of a forward pass that use tracked parameters.

What is exported here is the interface for applications that watch passes which somebody else makes.
"""

from kfs.kfac.capture.mode import Capture
from kfs.kfac.capture.passes import hidden_uses, send_back
from kfs.kfac.capture.session import Session

__all__ = ["Capture", "Session", "hidden_uses", "send_back"]
