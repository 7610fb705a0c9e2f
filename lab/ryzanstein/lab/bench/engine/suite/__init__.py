"""The suite of engine benchmarks, one document."""
