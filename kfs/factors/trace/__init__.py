"""Uses of parameters: what a rule sees, the plan that it returns, and the session that keeps plans between batches."""

from kfs.factors.trace.session import Session

__all__ = ["Session"]
