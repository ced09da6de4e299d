"""A second implementation of the contract: float64, plain loops, and nothing of the package that it checks.

It was written from the contract's sentences, not from the code, so that the two can only agree by both being right
(or by making the same mistake in reading a sentence). Slow and obvious on purpose.
"""

from oracle.decisions import Decided, InvalidInputError, decide
from oracle.metrics import metrics

__all__ = ["Decided", "InvalidInputError", "decide", "metrics"]
