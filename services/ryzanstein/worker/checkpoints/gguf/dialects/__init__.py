"""The architectures that are converted, and in what llama.cpp's files differ for each: tensors and hyper-parameters."""
