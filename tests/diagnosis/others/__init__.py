"""Causes and circumstances for which no detector was made or tuned: other vocabularies, lengths, numbers of rows, masks
and faults. `benchmarks/diagnosis_others.py` writes what `diagnose` answers to each into docs/diagnosis.md.
"""

from __future__ import annotations

from diagnosis.others.making import Other, right
from diagnosis.others.misplaced import MISPLACED
from diagnosis.others.models import MODELS
from diagnosis.others.places import PLACES
from diagnosis.others.prompts import PROMPTS
from diagnosis.others.samplers import SAMPLERS
from diagnosis.others.unshared import UNSHARED
from diagnosis.others.written import WRITTEN

OTHERS: tuple[Other, ...] = (*SAMPLERS, *MISPLACED, *WRITTEN, *MODELS, *PROMPTS, *PLACES, *UNSHARED)
"""Every case."""

__all__ = ["OTHERS", "Other", "right"]
