"""Plans for many processes: what each of them will own, hold, compute and send."""

from kfs.planning.plans import Plan, Sent, plan

__all__ = ["Plan", "Sent", "plan"]
