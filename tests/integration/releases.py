"""Copies of the package that are changed as the next two releases of tawebeval may be.

The next release has one more member in all that journals say, and reads one more version of
journals; the release after it writes that version, with a frame of another kind.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import tawebeval
from tawebeval.evaluations.journal import FORMAT_VERSION, READABLE_VERSIONS
from tawebeval.linux import launcher

PACKAGE = Path(tawebeval.__file__).parent
MEMBER = "of the next release"
NEXT, AFTER_NEXT = "99.1", "99.2"
UNREAD_VERSION = max(READABLE_VERSIONS) + 1
"""The version of journals that this release does not read."""

_MORE = f"""
import msgspec

_DATA = ("times", "variables", "extra_members")  # their members are not those of a class


def pack_more(value):
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
    if isinstance(found, list):
        return msgspec.msgpack.encode([*found, {MEMBER!r}])
    return msgspec.msgpack.encode(_add_members(found))


def pack_more_of_request(request):
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(request))
    return msgspec.msgpack.encode({{**found, {MEMBER!r}: [1]}})


def _add_members(value, name=""):
    if isinstance(value, list):
        return [_add_members(each) for each in value]
    if not isinstance(value, dict) or name in _DATA:
        return value
    return {{{MEMBER!r}: [1], **{{key: _add_members(each, key) for key, each in value.items()}}}}
"""
_PACKING = (
    ("evaluations/snapshot.py", "msgspec.msgpack.encode(self", "pack_more(self"),
    ("core/form.py", "msgspec.msgpack.encode(request", "pack_more_of_request(request"),
    ("core/results.py", "return _pack(packed", "return pack_more(packed"),
    ("core/segi.py", "_pack_checkpoint(checkpoint", "pack_more(checkpoint"),
)


def make_next_release(folder: Path) -> Path:
    """Return a new folder with the package as the next release."""
    shutil.copytree(PACKAGE, folder / PACKAGE.name)
    _change(folder, "__init__.py", f'"{tawebeval.__version__}"', f'"{NEXT}"')
    (folder / PACKAGE.name / "core" / "more.py").write_text(_MORE)
    for path, old, new in _PACKING:
        _change(folder, path, old, new)
        with (folder / PACKAGE.name / path).open("a") as module:
            module.write("\nfrom tawebeval.core.more import pack_more, pack_more_of_request\n")
    number = launcher.PROTOCOL_VERSION
    _change(
        folder,
        "linux/launcher.py",
        f"\nPROTOCOL_VERSION = {number}",
        f"\nPROTOCOL_VERSION = {number + 1}",
    )
    journal = "evaluations/journal.py"
    read = (*READABLE_VERSIONS, UNREAD_VERSION)
    _change(
        folder, journal, f"READABLE_VERSIONS = {READABLE_VERSIONS}", f"READABLE_VERSIONS = {read}"
    )
    _change(folder, journal, "kind in (_SNAPSHOT, _EVENTS)", "kind in (_SNAPSHOT, _EVENTS, 3)")
    _change(
        folder,
        journal,
        "else:\n                batches",
        "elif kind == 2:\n                batches",
    )
    return folder


def make_release_after_next(folder: Path) -> Path:
    """Return a new folder with the package as the release after the next one."""
    make_next_release(folder)
    _change(folder, "__init__.py", NEXT, AFTER_NEXT)
    journal = "evaluations/journal.py"
    _change(
        folder,
        journal,
        f"\nFORMAT_VERSION = {FORMAT_VERSION}",
        f"\nFORMAT_VERSION = {UNREAD_VERSION}",
    )
    written = "self._write_frame(_SNAPSHOT, [snapshot])"
    _change(folder, journal, written, f"{written}\n        self._write_frame(3, [b'note'])")
    return folder


def _change(folder: Path, path: str, old: str, new: str) -> None:
    """Change all places of a module that have a text; there must be one."""
    module = folder / PACKAGE.name / path
    source = module.read_text()
    assert old in source, f"{path} has no {old!r}: adapt this test"
    module.write_text(source.replace(old, new))
