"""Plans for uses of parameters, the descriptions of arguments that rules see, and the session that caches plans."""

from kfs.factors.trace.session import Session

__all__ = ["Session"]
