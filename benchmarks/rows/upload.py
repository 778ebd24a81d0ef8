"""A submission of 300 MB, sent by curl as a form: to the daemon, and to nginx.

nginx writes the body to a file as it comes, and knows nothing of forms; the daemon finds the file
in the form and writes that. Both have it in their page cache when they answer. The memory is the
daemon's peak, less what it took before the first upload.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.client import Client
from benchmarks.daemon import Daemon, daemon
from benchmarks.measure import CannotRun, Round, Row, interleave
from benchmarks.nginx import nginx
from benchmarks.running import Server

_SIZE = 300_000_000
_TARGET = 3.0
_MEMORY_TARGET = 64.0  # MiB
_MIB = 2**20
_CONFIGURATION = f"""\
[limits]
request_body = {_SIZE + _MIB}
"""
# The body goes to a file, which is removed after the answer. Only what nginx passes on makes it
# read a body at all, so it asks itself, without one.
_LOCATIONS = """\
        location = /evaluate {
            client_max_body_size 0;
            client_body_buffer_size 128k;
            client_body_in_file_only clean;
            proxy_pass_request_body off;
            proxy_set_header Content-Length "";
            proxy_pass http://127.0.0.1:PORT/done;
        }
        location = /done {
            return 200;
        }
"""


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows. Raises CannotRun."""
    if shutil.which("curl") is None:
        raise CannotRun("there is no curl here: apt-get install curl")
    with (
        TemporaryDirectory(prefix="tawebeval-benchmark-") as name,
        daemon(more=_CONFIGURATION) as ours,
        nginx(_LOCATIONS) as other,
    ):
        file = Path(name, "submission")
        file.write_bytes(os.urandom(_MIB) * (_SIZE // _MIB + 1))
        os.truncate(file, _SIZE)
        before = ours.memory("VmRSS")
        samples = interleave(
            rounds,
            {"ours": lambda: _ours(ours, file, before), "nginx": lambda: _send(other, file)[0]},
        )
    what = f"upload of {_SIZE // 10**6} MB"
    return [
        Row(
            f"{what}, to nginx that writes it to disk",
            "s",
            samples["ours.time"],
            samples["nginx.time"],
            _TARGET,
            higher_is_better=False,
        ),
        Row(
            "… growth of the daemon's memory",
            "MiB",
            samples["ours.memory"],
            target=_MEMORY_TARGET,
            higher_is_better=False,
        ),
    ]


def _ours(ours: Daemon, file: Path, before: int) -> Round:
    measured, answer = _send(ours, file, *ours.fields("true"))
    memory = (ours.memory("VmHWM") - before) / _MIB
    with Client(ours.port) as client:  # until it is consumed, the file is there
        ours.consume(client, json.loads(answer)["evaluation_id"])
    return {**measured, "memory": memory}


def _send(server: Server, file: Path, *fields: str) -> tuple[Round, bytes]:
    """Send a form with the file and other fields; return how long it took, and the answer."""
    command = ["curl", "--silent", "--show-error", "--fail"]
    command += ["--form", f"submission[source]=@{file}"]
    for field in fields:
        command += ["--form-string", field]
    url = f"http://127.0.0.1:{server.port}/evaluate"
    begin = time.perf_counter()
    answer = subprocess.run([*command, url], check=True, stdout=subprocess.PIPE).stdout
    return {"time": time.perf_counter() - begin}, answer
