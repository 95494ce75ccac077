"""What only a Python of its own can tell: what it imports, and what the environment of its start makes of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_hub_id_offline_says_what_else_to_give(tmp_path: Path) -> None:
    code = (
        "from paceline import errors, model_source\n"
        "try:\n    model_source.resolve('nobody/nothing')\n"
        "except errors.Unavailable as error:\n    print(error.message)\n"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert "give a folder, a .gguf file or one of smollm2-135m-instruct" in done.stdout


def test_model_references_need_no_torch() -> None:
    code = (
        "import sys\nfor name in ('torch', 'transformers', 'numpy'): sys.modules[name] = None\n"
        "import paceline.model_source\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_command_line_does_not_import_torch() -> None:
    program = "import sys, paceline.cli.app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
