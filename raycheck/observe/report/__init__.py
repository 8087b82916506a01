"""A run's report: one HTML page that needs nothing else, made from records and telemetry."""

from raycheck.observe.report.page import make_page
from raycheck.observe.report.sources import Run, read_run

__all__ = ["Run", "make_page", "read_run"]
