"""The HTTP server: sockets, connections, upgrades."""
