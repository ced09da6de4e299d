"""The hook at the worker's seam: verl's own training worker and losses, without Ray and without an engine that
samples.
"""
