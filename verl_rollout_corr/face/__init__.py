"""What Python callers get beyond the maths: arrays and lists as inputs, verdicts per unit and records per row."""
