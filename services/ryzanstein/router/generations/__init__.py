"""A generation as readers and recorders see it: token log, readers, retention."""
