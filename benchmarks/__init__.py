"""Measurements whose output stands in the documentation. Each prints or writes its own table."""
