"""The tour's report: one page of HTML that stands alone, with figures, tables, and things to play with."""

from kfs.report.page import left_out, write_report

__all__ = ["left_out", "write_report"]
