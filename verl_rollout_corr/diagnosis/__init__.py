"""How large a mismatch is, where it sits, and why: from a dump or from a log of metrics."""
