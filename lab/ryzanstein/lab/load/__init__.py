"""`ryzanstein load`: a load that checks what it gets, token by token."""
