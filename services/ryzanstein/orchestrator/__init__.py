"""The orchestrator: members with leases, desired deployments, and the view that routers follow. Never on a request's path."""
