"""Key/value rows of many sessions: reserve, commit, roll back."""
