"""The report needs Jinja; without it there is nothing to test here."""

from __future__ import annotations

import pytest

pytest.importorskip("jinja2")
