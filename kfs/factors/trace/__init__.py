"""Discovery: which operations use parameters, and plans for these uses, which a trace keeps for later batches."""

from kfs.factors.trace.discovery import Interception
from kfs.factors.trace.trace import Trace

__all__ = ["Interception", "Trace"]
