"""Everything that touches verl: one file per seam, all of them declared in `compat.py`."""
