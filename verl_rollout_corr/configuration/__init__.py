"""From what a user writes to a configuration that everything else trusts: the parser below, Hydra on top."""
