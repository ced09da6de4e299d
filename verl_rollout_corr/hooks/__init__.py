"""Everything that touches verl: one file per part of verl. `seams.py` declares every function that is replaced."""
