"""Measures fleets on this machine: prompts, turns, comparisons, reports, and `paceline bench methods`."""
