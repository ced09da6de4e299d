"""The fast twin of the definition on a CPU: one pass over the tokens in blocks that stay in the cache.

llvmlite compiles it. It takes the arguments of `maths.correction.correct`, the definition, and gives equal results;
what it cannot do is left to the definition. Callers use `choice.correct`, which chooses between the two.
"""
