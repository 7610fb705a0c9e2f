"""The router's HTTP face: the OpenAI API over the core. Knows neither nodes nor gRPC."""
