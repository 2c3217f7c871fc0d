"""What the steps share: their result file, the record of the run, the fused backends of a device."""

import json
import os
from pathlib import Path
from typing import Any

import capsfast


def publish(result: dict[str, Any]) -> None:
    """Hands ``result`` to the runner; the last call counts."""
    path = os.environ.get("STEP_RESULT")
    if path:
        draft = Path(path + ".part")
        draft.write_text(json.dumps(result))
        draft.replace(path)


def step_results(check: Path) -> dict[str, dict[str, Any]]:
    """By step, what the steps before have found."""
    try:
        steps = json.loads(check.read_text())["steps"]
    except (OSError, ValueError):
        return {}
    return {each["name"]: each["result"] for each in steps}


def fused_backends(device: str) -> list[str]:
    """Those that are available and serve ``device``, fastest first."""
    states = capsfast.backends().items()
    return [name for name, state in states if state.available and device in state.devices]
