"""Show events to people, and remember what matters of them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from demonstration.client import Event

GUTTER = "    │ "
POINTER = "    ▸ "


def say(text: str = "", end: str = "\n") -> None:
    """Print at once, a part of a line too."""
    print(text, end=end, flush=True)


class Viewer:
    """Prints the events of one evaluation: text as it is, data in words."""

    def __init__(self, folder: Path) -> None:
        """Start with an empty screen; files will be saved into ``folder``."""
        self.goals: dict[str, bool] = {}
        self.files: list[str] = []
        self.error: str | None = None
        """The reason of the ``evaluation_error``, if there was one."""
        self._folder = folder
        self._inside_line = False

    def show(self, event: Event) -> None:
        """Show the next event."""
        payload = event["payload"]
        if event["type"] == "text":
            self._show_text(payload)
            return
        self.close()
        kind = payload.get("type") if isinstance(payload, dict) else None
        if kind == "goal_result":
            self._show_goal(payload)
        elif kind == "file":
            self._show_file(payload)
        elif kind == "evaluation_error":
            self._show_error(payload)
        else:
            say(f"{POINTER}data: {json.dumps(payload, ensure_ascii=False)}")

    def close(self) -> None:
        """End the line that text was printed on, if there is one."""
        if self._inside_line:
            say()
        self._inside_line = False

    def _show_text(self, text: str) -> None:
        # Either one line terminator, or text without any.
        if not self._inside_line:
            say(GUTTER, end="")
        say(text, end="")
        self._inside_line = text != "\n"

    def _show_goal(self, payload: dict[str, Any]) -> None:
        goal, reached = payload["goal"], payload["result"]
        self.goals[goal] = reached
        say(f"{POINTER}goal {goal}: {'yes' if reached else 'no'}")

    def _show_file(self, payload: dict[str, Any]) -> None:
        # A base name again: what comes from elsewhere chooses no folder of ours.
        name = Path(payload["filename"]).name or "file"
        content = base64.b64decode(payload["content_base64"])
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / name).write_bytes(content)
        self.files.append(name)
        say(
            f"{POINTER}file {name}: {payload['content_type']}, {len(content):,} bytes,"
            f" saved as {self._folder / name}"
        )

    def _show_error(self, payload: dict[str, Any]) -> None:
        self.error = payload["reason"]
        say(f"{POINTER}evaluation error, reason {self.error}: {payload['message']}")
        shown = {"type", "reason", "message", "stderr"}
        for key, value in payload.items():
            if key not in shown:
                say(f"      {key}: {value}")
        for line in (payload.get("stderr") or "").splitlines():
            say(f"      stderr: {line}")
