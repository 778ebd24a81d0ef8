"""nginx, HAProxy and Caddy as processes, with the configurations that operators get.

Of these a test changes what any operator has to change: names, ports and certificates, and which
of the variants holds that stand there.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
from collections.abc import Mapping
from grp import getgrgid
from pathlib import Path
from typing import ClassVar

from tawebeval.sandbox.workspace import derive_log_pseudonym
from tests.cases.certificates import make_certificate
from tests.integration.harness import CONFIGURATION, Daemon, until
from tests.integration.ports import free_port, listens
from tests.integration.unprivileged import USER, temporary_folder

PROXIES = Path(__file__).resolve().parent.parent.parent / "etc" / "proxies"
BELOW = "/judge"
"""The base path of these configurations' variants."""
NAMES = ("a", "b", "c")
"""The names of several daemons."""

_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin"))

WAITING = "printf one; exec sleep 600"


def changed(text: str, changes: Mapping[str, str]) -> str:
    """Return a text in which each of these has another in its place; each must be there once."""
    for old, new in changes.items():
        assert text.count(old) == 1, f"{old!r} stands there {text.count(old)} times"
        text = text.replace(old, new)
    return text


def variant(text: str, commented: str, usual: str) -> str:
    """Return a text in which a line that is commented out holds in place of the usual one."""
    lines = text.splitlines(keepends=True)
    (there,) = (line for line in lines if line.strip() == f"# {commented}")
    (gone,) = (line for line in lines if line.strip() == usual)
    return changed(text, {there: f"{commented}\n", gone: ""})


def make_peers(daemons: Mapping[str, Daemon]) -> str:
    """Make daemons that have not started yet know each other; return their addresses."""
    urls = "".join(f"{name} = '{daemon.url}'\n" for name, daemon in daemons.items())
    for daemon in daemons.values():
        with (daemon.folder / "tawebeval.toml").open("a") as file:
            file.write(f"[service.peers]\n{urls}")
    return " ".join(f"127.0.0.1:{daemon.port}" for daemon in daemons.values())


class Proxy:
    """A proxy before the daemon at `upstream`, over HTTP and over TLS; below a path if need be."""

    program: ClassVar[str]
    file: ClassVar[str]

    def __init__(self, upstream: str, below: bool) -> None:
        self.folder = temporary_folder("tawebeval-proxy-")
        self.certificate = make_certificate(self.folder, "judge.example.org", "127.0.0.1")
        self.port, self.tls_port = free_port(), free_port()
        path = BELOW if below else ""
        self.url = f"http://127.0.0.1:{self.port}{path}"
        self.tls_url = f"https://127.0.0.1:{self.tls_port}{path}"
        self._process: subprocess.Popen[bytes] | None = None
        self._log = self.folder / "log"
        text = (PROXIES / self.file).read_text()
        (self.folder / self.file).write_text(self.configuration(text, upstream, below))
        atexit.register(self.remove)

    @classmethod
    def find(cls) -> str | None:
        return shutil.which(cls.program, path=_PATH)

    def configuration(self, text: str, upstream: str, below: bool) -> str:
        raise NotImplementedError

    def command(self) -> list[str]:
        raise NotImplementedError

    def start(self) -> None:
        program = self.find()
        assert program is not None
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [program, *self.command()],
                cwd=self.folder,
                env={**os.environ, "HOME": str(self.folder), "XDG_DATA_HOME": str(self.folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    async def ready(self) -> None:
        def ready() -> bool:
            assert self._process is not None, "start it first"
            assert self._process.poll() is None, f"{self.program} has ended:\n{self.log}"
            return all(map(listens, (self.port, self.tls_port)))

        await until(ready, f"{self.program} listens")

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    async def stop(self) -> None:
        process = self._process
        if process is not None:
            process.terminate()
            await until(lambda: process.poll() is not None, f"{self.program} ends")

    def remove(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        atexit.unregister(self.remove)


class Nginx(Proxy):
    """nginx; the configuration is what is included in one that everybody has."""

    program = "nginx"
    file = "nginx.conf"

    def configuration(self, text: str, upstream: str, below: bool) -> str:
        if below:
            text = variant(text, "location /judge/ {", "location / {")
        if upstream.startswith("unix:"):
            text = variant(
                text, "server unix:/run/tawebeval/socket;", "server 127.0.0.1:8080;"
            ).replace("unix:/run/tawebeval/socket", upstream)
        else:
            text = changed(text, {"127.0.0.1:8080": upstream})
        certificate = str(self.certificate)
        text = changed(
            text,
            {
                "listen 80;": f"listen 127.0.0.1:{self.port};",
                "listen 443 ": f"listen 127.0.0.1:{self.tls_port} ",
                "/etc/ssl/judge.example.org.crt": certificate,
                "/var/log/nginx/tawebeval.log": f"{self.folder}/access.log",
                "/etc/ssl/private/judge.example.org.key": certificate,
            },
        )
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        places = "".join(f"{kind}_temp_path {self.folder}/{kind};\n" for kind in kinds)
        # Where the tests are root's it is the daemons' user, who can enter their folders.
        user = f"user {USER.pw_name} {getgrgid(USER.pw_gid).gr_name};\n" if USER else ""
        return (
            f"daemon off;\npid {self.folder}/pid;\n{user}events {{}}\n"
            f"http {{\naccess_log off;\n{places}{text}}}\n"
        )

    def command(self) -> list[str]:
        return ["-p", str(self.folder), "-c", self.file, "-e", "stderr"]


class HAProxy(Proxy):
    program = "haproxy"
    file = "haproxy.cfg"

    def configuration(self, text: str, upstream: str, below: bool) -> str:
        if below:
            use = "use_backend tawebeval if { path /judge } || { path_beg /judge/ }"
            text = variant(text, use, "default_backend tawebeval")
        return self.with_places(changed(text, {"127.0.0.1:8080": upstream}))

    def with_places(self, text: str) -> str:
        return changed(
            text,
            {
                "bind :80\n": f"bind 127.0.0.1:{self.port}\n",
                "bind :443": f"bind 127.0.0.1:{self.tls_port}",
                "/etc/haproxy/judge.example.org.pem": str(self.certificate),
            },
        )

    def command(self) -> list[str]:
        return ["-db", "-f", self.file]


class HAProxyBeforeSeveral(HAProxy):
    """HAProxy before three daemons: `upstream` is their addresses, with spaces between.

    It takes no daemon for one that is away, for some may be slow here.
    """

    file = "haproxy-several.cfg"
    checks = "fall 1000"

    def configuration(self, text: str, upstream: str, below: bool) -> str:
        """Return the shipped configuration as it holds here; it has no variant below a path."""
        assert not below, "evaluations are found by the second part of the path"
        checks = "default-server check inter 2s fall 2 rise 1\n"
        assert text.count(checks) == 2, text
        text = text.replace(checks, f"default-server check {self.checks}\n")
        for port, new in zip((8081, 8082, 8083), upstream.split(), strict=True):
            old = f"127.0.0.1:{port}\n"
            assert old in text, old
            text = text.replace(old, f"{new}\n")
        return self.with_places(text)


class CheckingHAProxy(HAProxyBeforeSeveral):
    checks = "inter 200ms fall 2 rise 1"


class Caddy(Proxy):
    """Caddy, which talks to nobody about certificates here."""

    program = "caddy"
    file = "Caddyfile"

    def configuration(self, text: str, upstream: str, below: bool) -> str:
        if below:
            text = variant(text, "@tawebeval path /judge /judge/*", "@tawebeval path *")
        text = changed(text, {"127.0.0.1:8080": upstream})
        certificate = str(self.certificate)
        secure = {
            "# tls /etc/ssl/judge.example.org.crt": f"tls {certificate}",
            "/etc/ssl/private/judge.example.org.key": certificate,
        }
        options = (
            *("admin off", "auto_https disable_redirects", "default_bind 127.0.0.1"),
            *(f"http_port {self.port}", f"https_port {self.tls_port}"),
            "grace_period 1ms",  # at its end it would wait for that of streams
        )
        head, name, site = text.partition("\njudge.example.org {\n")
        assert name, "the site is not there"
        head = changed(head, {"\n{\n": "\n".join(["\n{", *options, ""])})
        # It has one scheme only, for Caddy sends all others to that.
        plain = f"\nhttp:// {{\n{site}"
        return f"{head}{plain}\nhttps://127.0.0.1 {{\n{changed(site, secure)}"

    def command(self) -> list[str]:
        return ["run", "--config", self.file, "--adapter", "caddyfile"]


def settings(base_path: str = "") -> str:
    """Return the configuration of a daemon behind a proxy, which connects by TCP or a socket."""
    return (
        f"{CONFIGURATION}\n[http]\nbase_path = '{base_path}'\n"
        "trusted_proxies = ['127.0.0.1', 'unix']\n[log]\nformat = 'json'\naccess = true\n"
    )


def lacking(proxy: type[Proxy]) -> str | None:
    """Return why the tests of a proxy are skipped, None if they are not."""
    return None if proxy.find() else f"there is no {proxy.program} (Debian package of that name)"


def answered(daemon: Daemon, identifier: str) -> list[str]:
    """Return the lines of the access log about streams of an evaluation that are over."""
    path = f"/evaluation/{derive_log_pseudonym(identifier)}/events"
    return [line for line in daemon.lines if path in line]
