"""Faults seen in the field, each with the right value and its siblings."""
