"""The orchestrator: members with leases, desired deployments, and the view that routers follow.

It is never on a request's path.
"""
