"""One process with one rank and two with two, for all tests of the worker."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from verl_modules import ignored_without

from hooks import rows, tiny_model
from hooks.pool import Pool

collect_ignore_glob = ignored_without("verl.trainer.ppo.ray_trainer")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model that every worker starts from."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model.save(folder)
    return folder


@pytest.fixture(scope="session")
def fresh_model(model_folder: Path) -> Callable[[], Any]:
    """A function that gives the same model in float64, to be trained in place."""
    model = tiny_model.load(model_folder)
    return lambda: copy.deepcopy(model)


@pytest.fixture(scope="session")
def drawn(fresh_model: Callable[[], Any]) -> list[rows.Row]:
    """Eight rows without a decision."""
    return rows.draw(fresh_model())


@pytest.fixture(scope="session")
def decided(drawn: list[rows.Row]) -> list[rows.Row]:
    """The same rows with weights and a decision that rejects one whole row and a quarter of the tokens."""
    return rows.with_decision(drawn)


@pytest.fixture(scope="session")
def pools(model_folder: Path) -> Iterator[dict[int, Pool]]:
    """verl's worker on 1 and on 2 ranks."""
    started = {ranks: Pool(ranks, model_folder) for ranks in (1, 2)}
    yield started
    for pool in started.values():
        pool.close()
