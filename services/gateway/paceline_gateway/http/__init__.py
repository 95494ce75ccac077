"""The OpenAI-compatible HTTP server: a thin shell over the same door as gRPC."""
