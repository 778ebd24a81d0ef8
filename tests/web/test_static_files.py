"""`web.routes`: the page for a browser, as it is served."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import tawebeval.web
from tawebeval.web.routes import OPENAPI_PATH, STATIC_RESOURCES
from tawebeval.web.streams import MAX_STREAM_WRITE_BYTES
from tests.cases import described
from tests.cases.web import LINK, CallerTestCase, WebTestCase
from tests.fakes.clients import Answer

ASSETS = {path: found for path, found in STATIC_RESOURCES.items() if path != OPENAPI_PATH}
FILES = Path(tawebeval.web.__file__).with_name("static")
ROOT = Path(__file__).resolve().parents[2]
MAX_COMPRESSED_PAGE = 150 * 1024
"""Bytes of all files that the page loads without its editor."""
PAGES = {"index.html": "/", "docs.html": "/docs"}
MAX_PARTS = max(len(found.content) for found in ASSETS.values()) // MAX_STREAM_WRITE_BYTES + 2


def policy(answer: Answer) -> dict[str, str]:
    """Return the directives of the Content-Security-Policy, by their names."""
    parts = answer.headers["content-security-policy"].split(";")
    return {name: rest for name, _, rest in (part.strip().partition(" ") for part in parts)}


class AssetTests(WebTestCase):
    def get(self, path: str, status: int = 200, method: str = "GET", **headers: str) -> Answer:
        asked = self.ask(method, path, headers=headers)
        self.settle()
        answer = self.answer(asked)
        self.assertEqual(answer.status, status, answer.body)
        described.check(method, path, answer)
        return answer

    def test_each_file_is_served_with_its_type_and_head_agrees(self) -> None:
        types = {
            ".html": "text/html; charset=utf-8",
            ".css": "text/css; charset=utf-8",
            ".js": "text/javascript; charset=utf-8",
            ".svg": "image/svg+xml",
            ".txt": "text/plain; charset=utf-8",
        }
        served = 2  # with the bundles
        for file in FILES.iterdir():
            path = PAGES.get(file.name, f"/static/{file.name}")
            answer = self.get(path)
            if file.name not in PAGES:
                self.assertEqual(answer.body, file.read_bytes())
            self.assertEqual(answer.headers["content-type"], types[file.suffix])
            head = self.get(path, method="HEAD")
            self.assertEqual(head.body, b"")
            raw = self.ask_raw(path, "gzip")
            self.assertEqual(head.headers["content-length"], str(len(raw.body)))
            for name in ("content-type", "etag", "content-security-policy"):
                self.assertEqual(head.headers[name], answer.headers[name])
            served += 1
        self.assertEqual(served, len(ASSETS))
        self.assertGreater(served, 5)

    def test_large_file_is_not_buffered_for_a_client_that_reads_nothing(self) -> None:
        path = "/static/vendor-swagger-ui.js"
        connection = self.service.connect()
        connection.take_no_more()
        connection.request(f"GET {path}")
        self.settle()
        self.assertLess(len(connection.received), 2 * MAX_STREAM_WRITE_BYTES)
        for _ in range(MAX_PARTS):
            connection.channel.resumeProducing()
            connection.settle()
        self.assertEqual(connection.answer().body, ASSETS[path].content)

    def test_reference_loads_existing_relative_urls_only(self) -> None:
        links = LINK.findall(self.get("/docs").body.decode())
        self.assertTrue(any(link.startswith("static/docs.js?v=") for link in links))
        for link in links:
            self.assertRegex(link, r"\A(static/|openapi\.json\Z)")
            self.get(f"/{link}")

    def test_page_loads_versioned_files_that_are_cached_as_immutable(self) -> None:
        page = self.get("/").body.decode()
        links = [link for link in LINK.findall(page) if not link.startswith("#")]
        self.assertLessEqual(len(set(links)), 3)  # script, style sheet and icon
        bundle = self.get("/static/bundle.js").body.decode()
        links += [f"static/{name}" for name in re.findall(r'import\("\./([^"]*)"\)', bundle)]
        self.assertGreater(len(set(links)), 6)
        for link in links:
            self.assertRegex(link, r"\Astatic/[\w.-]+\?v=[0-9a-f]{32}\Z")
            answer = self.get(f"/{link}")
            self.assertEqual(answer.headers["cache-control"], "public, max-age=31536000, immutable")
            for other in (link[:-1], f"{link}0", link.partition("?")[0]):
                answer = self.get(f"/{other}")
                self.assertEqual(answer.headers["cache-control"], "no-cache")

    def test_bundle_has_every_module_once(self) -> None:
        bundle = self.get("/static/bundle.js").body.decode()
        self.assertNotRegex(bundle, r"(?m)^(import|export) ")
        modules = {file.stem for file in FILES.glob("*.js") if "-" not in file.stem}
        found = re.findall(r"(?m)^const (\w+)_module = ", bundle)
        self.assertEqual(sorted(found), sorted((modules | {"messages"}) - {"docs"}))

    def test_page_is_small_and_loads_the_editor_lazily(self) -> None:
        files = {file.name: file.read_bytes() for file in FILES.iterdir()}
        self.assertIn(b'import("./vendor-editor.js")', files["editor.js"])
        self.assertNotIn(b"vendor-", files["index.html"])
        lazy = (
            *("vendor-editor.", "vendor-formula.", "vendor-licences.", "vendor-swagger-ui."),
            *("vendor-zip.", "docs."),
        )
        compressed = sum(
            len(gzip.compress(content))
            for name, content in files.items()
            if not name.startswith(lazy)
        )
        self.assertLess(compressed, MAX_COMPRESSED_PAGE)

    def test_bundled_packages_are_as_locked_and_in_the_copyright_file(self) -> None:
        locked = json.loads((ROOT / "scripts/vendor/package-lock.json").read_text())["packages"]
        versions = {
            path.removeprefix("node_modules/"): package["version"]
            for path, package in locked.items()
            if path and not package.get("dev") and not package.get("optional")
        }
        for package in locked.values():
            self.assertTrue(package.get("integrity") or package.get("private", package["name"]))
        licences = (FILES / "vendor-licences.txt").read_text()
        copyright_file = (ROOT / "debian/copyright").read_text()
        kinds = r"\((?:MIT|BSD-[23]-Clause|Apache-2\.0)\)"
        named = dict(re.findall(rf"(?m)^(\S+) (\d\S*) {kinds}$", licences))
        self.assertGreater(len(named), 20)
        for name, version in named.items():
            self.assertEqual(version, versions[name], name)
            self.assertIn(name, copyright_file)

    def test_pages_have_no_inline_scripts_or_styles(self) -> None:
        for name in PAGES:
            page = (FILES / name).read_text()
            self.assertNotRegex(page, r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son[a-z]+=")
        # Swagger UI makes HTML; the Content-Security-Policy lets no script in it run.
        for module in set(FILES.glob("*.js")) - {FILES / "vendor-swagger-ui.js"}:
            self.assertNotRegex(
                module.read_text(), r"innerHTML|outerHTML|insertAdjacentHTML|eval\("
            )

    def test_scripts_styles_and_connections_are_permitted_from_the_daemon_alone(self) -> None:
        for path in ASSETS:
            answer = self.get(path)
            directives = policy(answer)
            self.assertEqual(directives["default-src"], "'none'")
            for name in ("script-src", "style-src", "connect-src"):
                self.assertEqual(directives[name], "'self'")
            for name in ("base-uri", "form-action", "frame-ancestors"):
                self.assertEqual(directives[name], "'none'")
            self.assertNotIn("unsafe", answer.headers["content-security-policy"])
            self.assertEqual(answer.headers["x-content-type-options"], "nosniff")
            self.assertEqual(answer.headers["referrer-policy"], "no-referrer")

    def test_matching_etag_is_304_and_caches_revalidate_each_time(self) -> None:
        for path in STATIC_RESOURCES:
            answer = self.get(path)
            self.assertEqual(answer.headers["cache-control"], "no-cache")
            tag = answer.headers["etag"]
            self.assertRegex(tag, r'\A"[0-9a-f]{32}"\Z')
            for known in (tag, f"W/{tag}", f'"another", {tag}', "*"):
                again = self.get(path, 304, **{"If-None-Match": known})
                self.assertEqual(again.body, b"")
                self.assertEqual(again.headers["etag"], tag)
                self.assertEqual(again.headers["cache-control"], "no-cache")
            for other in ('"another"', tag.replace('"', '"x', 1), ""):
                self.get(path, 200, **{"If-None-Match": other})

    def test_gzip_is_served_where_accepted_with_a_tag_of_its_own(self) -> None:
        for path, asset in ASSETS.items():
            for accepted in ("gzip", "br, gzip;q=0.5", "*"):
                answer = self.ask_raw(path, accepted)
                self.assertEqual(answer.headers["content-encoding"], "gzip")
                self.assertEqual(answer.headers["content-length"], str(len(answer.body)))
                self.assertEqual(gzip.decompress(answer.body), asset.content)
                self.assertNotEqual(answer.headers["etag"], asset.entity_tag)
                self.assertEqual(answer.headers["vary"], "Accept-Encoding")
            for accepted in ("", "br", "gzip;q=0, *"):
                answer = self.ask_raw(path, accepted)
                self.assertNotIn("content-encoding", answer.headers)
                self.assertEqual(answer.body, asset.content)
                self.assertEqual(answer.headers["etag"], asset.entity_tag)
                self.assertEqual(answer.headers["vary"], "Accept-Encoding")

    def settle(self) -> None:
        """Let the parts of the largest file be sent, each in a turn of the reactor."""
        for _ in range(MAX_PARTS):
            self.service.reactor.advance(0)
            self.agent.flush()

    def ask_raw(self, path: str, accepted: str) -> Answer:
        connection = self.service.connect()
        connection.request(f"GET {path}", Accept_Encoding=accepted)
        self.settle()
        answer = connection.answer()
        connection.lose()
        return answer

    def test_no_other_file_or_method_is_served(self) -> None:
        for path in ("/static/", "/static/index.html", "/static/..%2Fassets.py", "/static/x.js"):
            self.request("GET", path, 404)
        self.assertIn("GET", self.request("POST", "/", 405).headers["allow"])


class TokenTests(CallerTestCase):
    def test_page_needs_no_token_and_its_requests_do(self) -> None:
        for path in ASSETS:
            answer = self.answer(self.ask("GET", path))
            self.assertEqual(answer.status, 200)
        for path in ("/evaluations", "/static/x.js", "/static"):
            answer = self.answer(self.ask("GET", path))
            self.assertEqual(answer.status, 401, path)
