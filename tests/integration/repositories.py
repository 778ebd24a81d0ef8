"""Real repositories, and the servers that hand them out."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from base64 import b64encode
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TypeVar

from twisted.trial.unittest import SynchronousTestCase

from tests.cases.patience import PATIENCE
from tests.integration.ports import free_port, listens
from tests.integration.unprivileged import give

ENVIRONMENT = {
    "PATH": os.environ.get("PATH", os.defpath),
    "LC_ALL": "C",
    "HOME": "/nonexistent",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    # Repositories belong to the daemons' user, and root may work in them.
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
    "GIT_AUTHOR_NAME": "A. Teacher",
    "GIT_AUTHOR_EMAIL": "teacher@example.org",
    "GIT_COMMITTER_NAME": "A. Teacher",
    "GIT_COMMITTER_EMAIL": "teacher@example.org",
}


def git(directory: Path, *arguments: str) -> str:
    """Return what a git command prints."""
    done = subprocess.run(
        ["git", *arguments], cwd=directory, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, f"git {arguments}: {done.stderr}"
    return done.stdout.strip()


class GitRepository:
    """A repository with a working tree, made in `folder`; it may begin as a copy of another."""

    def __init__(self, folder: Path, original: GitRepository | None = None) -> None:
        self.folder = folder
        if original is None:
            folder.mkdir(parents=True)
            git(folder, "init", "--quiet", "--initial-branch=main")
        else:
            shutil.copytree(original.folder, folder, symlinks=True)
        for owned in (folder, folder / ".git"):  # git serves others' only over the network
            give(owned)

    @property
    def url(self) -> str:
        return f"file://{self.folder}"

    def write(self, path: str, content: str | bytes, mode: int = 0o644) -> None:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        file.chmod(mode)

    def link(self, path: str, target: str) -> None:
        (self.folder / path).symlink_to(target)

    def commit(self) -> str:
        """Commit all there is; return the commit's OID."""
        git(self.folder, "add", "--all")
        git(self.folder, "commit", "--quiet", "--allow-empty", "--message=A step")
        return git(self.folder, "rev-parse", "HEAD")

    def branch(self, name: str, start: str = "HEAD") -> None:
        git(self.folder, "checkout", "--quiet", "-b", name, start)

    def tag(self, name: str) -> str:
        """Tag what was committed last, with a message; return the tag's OID."""
        git(self.folder, "tag", "--annotate", "--message=A mark", name)
        return git(self.folder, "rev-parse", name)

    def history(self, name: str, steps: int = 3) -> list[str]:
        """Make commits, each with its own content of the file `name`; return their OIDs."""
        commits = []
        for step in range(steps):
            self.write(name, f"{name} {step}\n")
            commits.append(self.commit())
        return commits


class GitDaemon:
    """`git daemon` for what lies in `root`."""

    def __init__(self, root: Path) -> None:
        port = free_port()
        self.url = f"git://127.0.0.1:{port}"
        program = Path(git(root, "--exec-path"), "git-daemon")
        assert program.exists(), f"these tests need git daemon: there is no {program}"
        self._process = subprocess.Popen(
            [
                *(str(program), "--export-all", "--reuseaddr", f"--base-path={root}"),
                *("--listen=127.0.0.1", f"--port={port}", str(root)),
            ],
            env=ENVIRONMENT,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + PATIENCE
        while not listens(port):
            assert time.monotonic() < deadline, "git daemon does not listen"
            time.sleep(0.01)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


class HttpServer:
    """Hands out what lies in `root`: by `git http-backend`, or as plain files (`dumb`).

    Without `v2` it knows nothing of the protocol's second version, and so hands out only
    what it advertises. With a `login`, "NAME:PASSWORD", it answers nobody else.
    `requests` are the methods and paths of what it was asked for, and `authorizations` the headers
    of that name.
    """

    def __init__(
        self, root: Path, *, v2: bool = True, dumb: bool = False, login: str | None = None
    ) -> None:
        self.root = root
        self.login = login
        self.authorizations: list[str] = []
        self.v2 = v2
        self.dumb = dumb
        self.requests: list[str] = []
        self.half_sent = threading.Event()
        self._rest = threading.Event()
        self._rest.set()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.site = self
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        self._stopped = False

    def hold(self) -> None:
        """From now on send only half of a pack, set `half_sent`, and wait for `release`."""
        self._rest.clear()

    def release(self) -> None:
        self._rest.set()

    def send_half(self) -> None:
        """Say that half of something is sent; wait if the rest is held back."""
        self.half_sent.set()
        self._rest.wait(PATIENCE)

    def stop(self) -> None:
        self.release()
        if not self._stopped:
            self._stopped = True
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def answer(self, handler: BaseHTTPRequestHandler, path: str, body: bytes) -> bool:
        """Answer a request that is not for git; tell whether it was one."""
        return False

    @property
    def fetches(self) -> int:
        """How many times somebody began to ask for a repository."""
        return sum("/info/refs" in request for request in self.requests)


class ScriptedServer(HttpServer):
    """A server of git that answers the paths with some beginnings itself.

    `answers` are beginnings, each with a status and a body. With the status of a redirect the text
    replaces the beginning in the new location.
    """

    def __init__(self, root: Path, *answers: tuple[str, int, str], **settings: bool) -> None:
        super().__init__(root, **settings)  # type: ignore[arg-type]
        self._answers = answers

    def answer(self, handler: BaseHTTPRequestHandler, path: str, body: bytes) -> bool:
        for beginning, status, text in self._answers:
            if path.startswith(beginning):
                is_redirect = 300 <= status < 400
                content = b"" if is_redirect else text.encode()
                handler.send_response(status)
                if is_redirect:
                    handler.send_header("Location", path.replace(beginning, text))
                handler.send_header("Content-Length", str(len(content)))
                handler.end_headers()
                handler.wfile.write(content)
                return True
        return False


Server = TypeVar("Server", bound=GitDaemon | HttpServer)


def stop_after(case: SynchronousTestCase, server: Server) -> Server:
    """Return a server, which is stopped after the test."""
    case.addCleanup(server.stop)
    return server


class _Server(ThreadingHTTPServer):
    site: HttpServer
    daemon_threads = False


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self._body())

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers["Content-Length"]))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        return body

    def _welcome(self, login: str) -> bool:
        """Tell whether who asks has shown the login; ask for it where nothing was shown."""
        shown = self.headers.get("Authorization", "")
        if shown:
            self.server.site.authorizations.append(shown)
        if shown == "Basic " + b64encode(login.encode()).decode():
            return True
        self.send_response(403 if shown else 401)
        self.send_header("WWW-Authenticate", 'Basic realm="a private repository"')
        self.end_headers()
        return False

    def _answer(self, body: bytes) -> None:
        site = self.server.site
        path, _, query = self.path.partition("?")
        site.requests.append(f"{self.command} {path}")
        if site.login is not None and not self._welcome(site.login):
            return
        if site.answer(self, path, body):
            return
        if site.dumb:
            file = site.root / path.lstrip("/")
            self.send_response(200 if file.is_file() else 404)
            self.end_headers()
            if file.is_file():
                with file.open("rb") as content, suppress(OSError):  # whoever asked has gone
                    shutil.copyfileobj(content, self.wfile)
            return
        done = subprocess.run(
            ["git", "http-backend"],
            input=body,
            capture_output=True,
            env={
                **ENVIRONMENT,
                "GIT_PROJECT_ROOT": str(site.root),
                "GIT_HTTP_EXPORT_ALL": "1",
                "REQUEST_METHOD": self.command,
                "PATH_INFO": path,
                "QUERY_STRING": query,
                "CONTENT_TYPE": self.headers.get("Content-Type", ""),
                "CONTENT_LENGTH": str(len(body)),
                "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
                "GIT_PROTOCOL": self.headers.get("Git-Protocol", "") if site.v2 else "",
                "REMOTE_ADDR": "127.0.0.1",
            },
        )
        head, _, content = done.stdout.partition(b"\r\n\r\n")
        headers = [line.split(": ", 1) for line in head.decode().split("\r\n")]
        status = dict(headers).get("Status", "200 OK")
        self.send_response(int(status.split()[0]))
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        try:
            if b"PACK" in content:
                half = len(content) // 2
                self.wfile.write(content[:half])
                self.wfile.flush()
                site.send_half()
                content = content[half:]
            self.wfile.write(content)
        except OSError:
            self.close_connection = True  # whoever asked has gone
