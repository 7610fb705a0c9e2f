"""What the faces stand on: admission, one turn at a time in a session, a generation's life, other routers."""
