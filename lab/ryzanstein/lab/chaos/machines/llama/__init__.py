"""An inference server of others: llama.cpp."""
