"""trainvet vets neural-network training while it runs."""

from trainvet.action import TrainingAborted
from trainvet.finding import Finding, Severity
from trainvet.report import Report
from trainvet.rule import Rule
from trainvet.watchpoint import Watchpoint

__version__ = "0.1.0"
__all__ = ["Finding", "Report", "Rule", "Severity", "TrainingAborted", "Watchpoint", "__version__"]
