"""From a dump or a log to one record, and from the record to the terminal, JSON and HTML. Needs no verl."""
