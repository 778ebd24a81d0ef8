"""Count of the rooms (files of the package) that a journey enters, by `sys.setprofile`.

`python -m benchmarks.rooms` prints, for each journey, the rooms and the moves between them. The
journeys run in memory, over the fakes of the tests: no git, no process, no sandbox.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import attrs

import tawebeval
from tawebeval.core.evaluations import Checkout, IdentifierIssuer
from tawebeval.evaluations.service import EvaluationRegistry
from tests.fakes.callbacks import FakeCallbacks
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
    # The start makes them, for it checks problems by them; forms find them in a cache.
    assert service.configuration.limits.requestable_ranges
    client, agent = service.treq()
    names = ("POST to start", "stdout to poll", "DELETE to end", "restart")
    found = {name: Journey() for name in names}

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
    ask("POST", "/evaluate", data=form(parts()), headers={"Content-Type": MULTIPART})
    service.world.turn()
    follow_restart(service, found["restart"])
    return found


def follow_restart(service: Service, journey: Journey) -> None:
    """Follow an ended and a running evaluation from their rows to the daemon's next process."""
    rows = service.world.kill_daemon()
    registry = EvaluationRegistry(
        service.world.context(),
        IdentifierIssuer(bytes(32), os.urandom),
        (service.running, service.queued, None, None),
        service.root / "evaluations",
        FakeCallbacks(),  # type: ignore[arg-type]
    )
    with follow(journey):
        registry.restore_evaluations(
            rows,
            service.root / "uploads",
            lambda commit, path: Checkout(commit, path, lambda: None),
        )
        service.world.turn()
    states = [registry.get_status(row.identifier)["state"] for row in rows]
    assert states == ["cancelled", "running"], "what had ended can be read, what ran goes on"


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
