"""Keys and tenants as they are kept: the values, the keys file, and Redis."""
