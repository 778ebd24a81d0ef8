"""Count of the rooms (files of the package) that a journey enters, by `sys.setprofile`.

`python -m benchmarks.rooms` prints, for each journey, the rooms and the moves between them. The
journeys run in memory, over the fakes of the tests: no git, no process, no sandbox.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import attrs

import tawebeval
from tests.fakes.clients import MULTIPART, Service, form, parts

_PACKAGE = str(Path(tawebeval.__file__).parent) + "/"
_BASE = "http://localhost:8080"


@attrs.define
class Journey:
    """The files that were entered, in order, without repetitions in a row."""

    visits: list[str] = attrs.field(factory=list)

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """Take an event of `sys.setprofile`."""
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(_PACKAGE):
            room = path.removeprefix(_PACKAGE)
            if self.visits[-1:] != [room]:
                self.visits.append(room)

    @property
    def rooms(self) -> list[str]:
        """The files, in the order of the first visits."""
        return list(dict.fromkeys(self.visits))


@contextmanager
def follow(journey: Journey) -> Iterator[None]:
    """Note the files that are entered in the body."""
    sys.setprofile(journey.note)
    try:
        yield
    finally:
        sys.setprofile(None)


def follow_journeys(directory: Path) -> dict[str, Journey]:
    """Return the journeys by name; the service's files lie in `directory`."""
    service = Service(directory)
    client, agent = service.treq()
    found = {name: Journey() for name in ("POST to start", "stdout to poll", "DELETE to end")}

    def ask(method: str, path: str, **settings: Any) -> Any:
        answer = client.request(method, _BASE + path, **settings)
        agent.flush()
        return answer

    def read(answer: Any) -> Any:
        body: list[Any] = []
        answer.addCallback(lambda response: response.json()).addCallback(body.append)
        agent.flush()
        return body[0]

    with follow(found["POST to start"]):
        posted = ask("POST", "/evaluate", data=form(parts()), headers={"Content-Type": MULTIPART})
        service.world.turn()
    identifier = read(posted)["evaluation_id"]
    waiting = ask("GET", f"/evaluation/{identifier}/events?wait=20")
    with follow(found["stdout to poll"]):
        service.world.child.print(b"hello\n")
        agent.flush()
    read(waiting)
    with follow(found["DELETE to end"]):
        ask("DELETE", f"/evaluation/{identifier}")
        service.world.child.end(signal=15)
        service.world.turn()
        agent.flush()
    service.close()
    return found


def main(show: Callable[[str], object] = print) -> None:
    """Print the journeys."""
    with tempfile.TemporaryDirectory() as directory:
        for name, journey in follow_journeys(Path(directory)).items():
            moves = len(journey.visits) - 1
            show(f"{name}: {len(journey.rooms)} rooms, {moves} moves")
            for room in journey.rooms:
                show(f"    {room}")


if __name__ == "__main__":
    main()
