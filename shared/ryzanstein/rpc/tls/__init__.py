"""TLS of services: whom a server admits, the certificates of its ports, and what the settings say of both."""
