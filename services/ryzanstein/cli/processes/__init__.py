"""The processes of a local cluster: their ports, start, logs and end."""
