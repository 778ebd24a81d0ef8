"""Events as lines in the terminal."""

from __future__ import annotations

import base64
import json
from typing import Any

from demonstration.client import Event

GUTTER = "    │ "
POINTER = "    ▸ "


def say(text: str = "", end: str = "\n") -> None:
    """Print without buffering, also a part of a line."""
    print(text, end=end, flush=True)


class Viewer:
    """Prints the events of one evaluation, and keeps goals, file names and the error."""

    def __init__(self) -> None:
        """Start at the beginning of a line."""
        self.goals: dict[str, bool] = {}
        self.files: list[str] = []
        self.error: str | None = None
        """The reason of the ``evaluation_error``, None without one."""
        self._inside_line = False

    def show(self, event: Event) -> None:
        """Print the next event."""
        payload = event["payload"]
        if event["type"] == "text":
            self._show_text(payload)
            return
        self.close()
        kind = payload.get("type") if isinstance(payload, dict) else None
        if kind == "goal_result":
            self._show_goal(payload)
        elif kind == "case":
            about = f": {payload['message']}" if "message" in payload else ""
            say(f"{POINTER}case {payload['case']}: {payload['verdict'].replace('_', ' ')}{about}")
        elif kind == "score":
            say(f"{POINTER}score: {payload['score']} of {payload['maximum']}")
        elif kind == "progress":
            pass  # the cases show it
        elif kind == "file":
            self._show_file(payload)
        elif kind == "evaluation_error":
            self._show_error(payload)
        else:
            say(f"{POINTER}data: {json.dumps(payload, ensure_ascii=False)}")

    def close(self) -> None:
        """End an unfinished line of text."""
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
        self.goals[goal] = reached or self.goals.get(goal, False)
        say(f"{POINTER}goal {goal}: {'yes' if reached else 'no'}")

    def _show_file(self, payload: dict[str, Any]) -> None:
        name = payload["filename"]
        size = len(base64.b64decode(payload["content_base64"]))
        self.files.append(name)
        say(f"{POINTER}file {name}: {payload['content_type']}, {size:,} bytes")

    def _show_error(self, payload: dict[str, Any]) -> None:
        self.error = payload["reason"]
        say(f"{POINTER}evaluation failed ({self.error}): {payload['message']}")
        shown = {"type", "reason", "message", "stderr"}
        for key, value in payload.items():
            if key not in shown:
                say(f"      {key}: {value}")
        for line in (payload.get("stderr") or "").splitlines():
            say(f"      stderr: {line}")
