"""Which sequences run in the next step. Plain Python."""
