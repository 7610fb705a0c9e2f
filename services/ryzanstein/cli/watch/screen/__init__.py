"""What is seen and typed at a terminal. It shows what the rooms beside it decide, and is the only one that knows textual."""
