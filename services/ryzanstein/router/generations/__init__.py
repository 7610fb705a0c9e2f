"""A generation as readers and recorders see it: its token log, its readers, how long it is retained."""
