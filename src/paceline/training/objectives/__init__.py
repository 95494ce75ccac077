"""One file per method: the module that learns, its loss, what it predicts, how it is written."""
