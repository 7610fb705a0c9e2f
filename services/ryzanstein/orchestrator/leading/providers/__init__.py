"""Services that hold the lease."""
