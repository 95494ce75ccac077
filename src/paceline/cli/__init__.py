"""The command line: `paceline up|generate|chat|serve|quantize|doctor`."""
