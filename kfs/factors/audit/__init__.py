"""The audit: checks, on a few of the user's own examples, that capture reproduces what the model computes."""

from kfs.factors.audit.audit import NotRepeatableError
from kfs.factors.audit.audits import Audits, distrust, forget_audits, predictor
from kfs.factors.audit.report import Audit, merge_audits
from kfs.factors.audit.row_experiments import Counts

__all__ = ["Audit", "Audits", "Counts", "NotRepeatableError", "distrust", "forget_audits", "merge_audits", "predictor"]
