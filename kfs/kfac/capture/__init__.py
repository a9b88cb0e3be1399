"""Capture: seeing the operations of a forward pass that use tracked parameters.

What is exported here is the interface for applications that watch passes which somebody else makes. What records and
replays passes comes from `kfs.recording`.
"""

from kfs.kfac.capture.audit import NotRepeatableError
from kfs.kfac.capture.audit_report import Audit, both_audits
from kfs.kfac.capture.audits import Audits, distrust, forget_audits
from kfs.kfac.capture.counted_rows import BatchMasks
from kfs.kfac.capture.mode import Capture, forward
from kfs.kfac.capture.replay import recorder_for
from kfs.kfac.capture.row_rules import Counts
from kfs.kfac.capture.session import Session
from kfs.kfac.capture.sites import Known
from kfs.kfac.capture.tap import backward, measure_rows, pass_derived, send_back
from kfs.recording import CudaRecorder, Graph, Reads, Recorder, Replays, shape_of, why_not

__all__ = [
    "Audit",
    "Audits",
    "BatchMasks",
    "Capture",
    "Counts",
    "CudaRecorder",
    "Graph",
    "Known",
    "NotRepeatableError",
    "Reads",
    "Recorder",
    "Replays",
    "Session",
    "backward",
    "both_audits",
    "distrust",
    "forget_audits",
    "forward",
    "measure_rows",
    "pass_derived",
    "recorder_for",
    "send_back",
    "shape_of",
    "why_not",
]
