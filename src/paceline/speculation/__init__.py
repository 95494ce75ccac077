"""The maths of speculation: acceptance, noise, trees. No I/O and no model."""
