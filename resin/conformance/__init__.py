"""The conformance kit: runs a model through every equality that the Engine promises, and against reference logits."""

from resin.conformance.kit import ConformanceKit, Settings
from resin.conformance.report import Check, Report
from resin.conformance.verification import choose_checks, verify

__all__ = ["Check", "ConformanceKit", "Report", "Settings", "choose_checks", "verify"]
