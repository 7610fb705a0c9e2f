"""How step times change with tensor parallelism."""
