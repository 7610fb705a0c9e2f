"""The router's HTTP face: the OpenAI API over the core. It knows neither nodes nor gRPC."""
