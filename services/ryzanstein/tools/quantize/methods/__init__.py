"""Methods that choose quantized weights: GPTQ, AWQ and the others."""
