"""How a rank's progress is published and watched."""
