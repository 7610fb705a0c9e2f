"""What does the calls: with threads that block, or with an event loop."""
