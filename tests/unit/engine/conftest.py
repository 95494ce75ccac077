"""Engine tests run tiny models: one thread each, so that they do not fight over the cores."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
