"""The limits of tenants: what they may use, what they used, and how several routers share both."""
