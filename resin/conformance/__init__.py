"""The conformance kit: runs a model through every equality that the Engine promises, and against reference logits."""

from resin.conformance.kit import ConformanceKit, Settings, verify
from resin.conformance.report import Check, Report

__all__ = ["Check", "ConformanceKit", "Report", "Settings", "verify"]
