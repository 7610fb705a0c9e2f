"""Programs that run before serving: convert, quantize, synthesize."""
