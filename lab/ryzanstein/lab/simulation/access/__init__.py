"""What simulated clients may do: their keys, and the server of their tenants' limits."""
