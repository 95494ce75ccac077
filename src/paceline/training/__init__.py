"""Trains drafters for a target on the target's own answers.

| file | what it is |
|---|---|
| `corpus.py` | the answers as token ids, read from one file or from the shards of a collection; held-out split |
| `collect.py` | asks the target for answers and writes them in shards |
| `target.py` | the frozen target: its hidden states, embedding and head |
| `features.py` | hidden states on disk, computed when first needed |
| `batches.py` | which sequences make a batch, and the batch itself |
| `objectives/` | one file per method: the module that learns, its loss, what it predicts, how it is written |
| `acceptance.py` | how many tokens of a chain would be accepted |
| `loop.py` | the one training loop, on `accelerate` |
| `checkpoint.py` | the state of a run, written whole or not at all |
| `report.py` | history, plots and provenance beside the result |
| `run.py` | puts these together for a method |

Nothing here is imported by a service.
"""
