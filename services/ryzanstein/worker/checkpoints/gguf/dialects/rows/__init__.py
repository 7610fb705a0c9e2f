"""How llama.cpp stores each of our architectures."""
