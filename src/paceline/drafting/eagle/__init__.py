"""The methods `eagle` and `eagle3`: one decoder layer that goes on from the target's own hidden states.

| file | what |
|---|---|
| `taps.py` | which hidden states the target keeps for a head |
| `head.py`, `head_build.py` | the layer, and how it is made of a checkpoint |
| `head_pass.py` | one pass of the layer over the paged rows of many sessions |
| `sessions.py` | the rows of each session, and the rule by which they follow the context |
| `growth.py` | how a draft grows, level by level, and which of its nodes are kept |
| `method.py` | the drafting method |

EAGLE (Li et al. 2024, arXiv 2401.15077), EAGLE-2 (2406.16858), EAGLE-3 (2503.01840).
"""

from paceline.drafting.eagle.method import EagleMethod
from paceline.drafting.eagle.taps import make_taps

__all__ = ["EagleMethod", "make_taps"]
