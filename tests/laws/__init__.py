"""Laws that hold for every batch, as properties."""
