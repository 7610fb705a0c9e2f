"""The router: gRPC and HTTP faces over one core.

The core admits requests, chooses nodes, and keeps exactly-once token logs.
"""
