"""The connection to a server: where it is, its client, its events, what goes wrong."""
