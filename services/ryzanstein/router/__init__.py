"""The router: gRPC, HTTP and WebSocket faces over one core.

The core admits requests, chooses nodes, and keeps exactly-once token logs.
"""
