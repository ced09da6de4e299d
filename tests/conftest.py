"""What every test shares: how hard hypothesis tries.

`HYPOTHESIS_PROFILE=slow` runs thousands of examples per property (and ten times the seeded batches of tests/oracle).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))  # the oracle is imported by name, and importlib mode adds no path

for profile, examples in (("default", 150), ("slow", 3000)):
    settings.register_profile(
        profile, max_examples=examples, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

torch.set_num_threads(1)  # batches of a few tokens: threads only wait for each other
