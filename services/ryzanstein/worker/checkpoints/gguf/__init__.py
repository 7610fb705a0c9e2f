"""GGUF, the file format of llama.cpp: read, written, and converted from and to the Hugging Face layout.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""
