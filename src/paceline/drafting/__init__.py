"""Ways of drafting, one file per method."""
