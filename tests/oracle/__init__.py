"""A second implementation of the rules: float64, plain loops, and nothing of the package that it checks.

It follows the formulas of docs/reference and the rules of docs/architecture.md, and was not written from the
code, so that the two can only agree by both being right, or by making the same mistake in reading a sentence. Slow and
obvious on purpose.
"""

from oracle.decisions import Decided, InvalidInputError, decide
from oracle.metrics import metrics

__all__ = ["Decided", "InvalidInputError", "decide", "metrics"]
