"""Dumps of what was trained on: Parquet files with a versioned schema, their writer and their streaming reader."""
