"""`ryzanstein logs`: the logs of a local cluster as one."""
