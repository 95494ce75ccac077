"""Text on the gateway: tokens, templates, visible text, the end of a generation. No torch."""
