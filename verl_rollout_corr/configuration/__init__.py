"""From what a user writes to a checked configuration: the parser below, Hydra on top."""
