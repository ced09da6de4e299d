"""Runs a program of verl as if the hook had not been loaded: nothing answers to the presets' interpolations."""

from __future__ import annotations

import runpy
import sys

from omegaconf import OmegaConf

from verl_rollout_corr.configuration import resolver

if __name__ == "__main__":
    OmegaConf.clear_resolver(resolver.NAME)
    program, *arguments = sys.argv[1:]
    sys.argv = [program, *arguments]
    runpy.run_module(program, run_name="__main__", alter_sys=True)
