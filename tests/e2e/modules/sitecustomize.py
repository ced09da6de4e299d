"""In every process of a run of these tests, before anything is imported: the garbage collector looks less often.

A start imports torch, vLLM and verl in some ten processes, and a fifth of what that takes is the collector's, which
finds nothing.
"""

import gc

gc.set_threshold(200_000, 100, 100)
