"""Several orchestrators of which one leads: their Redis server, what strikes them, and what must hold."""
