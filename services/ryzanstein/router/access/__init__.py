"""Who may use this router: keys, tokens, and the limits of tenants."""
