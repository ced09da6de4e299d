"""The definition of rollout correction, readable: tensors in, decisions and additive sums out. Imports torch only."""
