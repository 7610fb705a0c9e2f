"""One run of a fault, and what it did to every answer."""
