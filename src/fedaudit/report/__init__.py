"""The report package: an AuditResult in, one self-contained HTML page out."""

from fedaudit.report.page import render_report, write_report

__all__ = ["render_report", "write_report"]
