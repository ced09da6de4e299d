"""Statements of the literature, by exact enumeration over a small vocabulary and length."""
