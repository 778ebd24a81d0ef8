"""nginx with a configuration of its own, as a baseline."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.measure import CannotRun
from benchmarks.running import Server, free_port, running, wait_for

# Debian's package has it in a directory of administrators.
_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin"))
_CONFIGURATION = """\
daemon off;
master_process off;
pid {root}/pid;
error_log {root}/error.log;
events {{ worker_connections 5000; }}
http {{
    access_log off;
    keepalive_requests 1000000;
    client_body_temp_path {root}/body;
    proxy_temp_path {root}/proxy;
    fastcgi_temp_path {root}/fastcgi;
    scgi_temp_path {root}/scgi;
    uwsgi_temp_path {root}/uwsgi;
    server {{
        listen 127.0.0.1:{port} backlog=1024;
{locations}
    }}
}}
"""


@contextmanager
def nginx(locations: str) -> Iterator[Server]:
    """Run a process of nginx with these blocks, in which PORT is its own port.

    Raises: CannotRun.
    """
    program = shutil.which("nginx", path=_PATH)
    if program is None:
        raise CannotRun("there is no nginx here: apt-get install nginx")
    with TemporaryDirectory(prefix="tawebeval-benchmark-") as name:
        root, port = Path(name), free_port()
        blocks = locations.replace("PORT", str(port))
        (root / "nginx.conf").write_text(
            _CONFIGURATION.format(root=root, port=port, locations=blocks)
        )
        argv = [program, "-p", name, "-c", "nginx.conf", "-e", str(root / "error.log")]
        with running(argv) as process:
            wait_for(process, port, "nginx", root / "error.log")
            yield Server(process.pid, port)
