"""Where keys come from: a file or Redis, watched in the background."""
