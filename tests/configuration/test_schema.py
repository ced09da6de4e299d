"""The node: the documented keys, nothing that a later preset could reset, nothing heavy to unpickle."""

from __future__ import annotations

import pickle
import subprocess
import sys

from omegaconf import OmegaConf

from verl_rollout_corr.configuration.parser import to_mapping
from verl_rollout_corr.configuration.schema import RolloutCorrNode
from verl_rollout_corr.grammar import RolloutCorrConfig


def test_the_node_has_the_keys_that_the_parser_reads() -> None:
    def keys(node: object) -> object:
        return {key: keys(value) for key, value in node.items()} if isinstance(node, dict) else None

    node = OmegaConf.to_container(OmegaConf.structured(RolloutCorrNode))
    assert keys(node) == keys(to_mapping(RolloutCorrConfig()))


def test_merging_the_schema_again_resets_nothing() -> None:
    schema = OmegaConf.structured(RolloutCorrNode)
    values = to_mapping(RolloutCorrConfig(presets=("mine",))) | {"reject": {"token_k1": {"upper": 2}}}
    node = OmegaConf.merge(schema, values, schema)
    assert OmegaConf.to_container(node) == values


def test_unpickling_the_node_imports_nothing_heavy() -> None:
    pickled = pickle.dumps(OmegaConf.structured(RolloutCorrNode))
    code = (
        f"import pickle, sys; pickle.loads({pickled!r});"
        "print('verl_rollout_corr.configuration.schema' in sys.modules, "
        "sorted({'torch', 'verl', 'hydra', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True []"
