"""`git.gitwords`: what git's words mean, each said by a real git once."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.git.gitwords import (
    hindrance,
    is_damage,
    is_not_offered,
    is_not_there,
    is_starved,
    was_killed,
)

OID = "c" * 40

OFFERED = (
    f"error: Server does not allow request for unadvertised object {OID}",
    "fatal: couldn't find remote ref refs/heads/x",
    "fatal: dumb http transport does not support shallow capabilities",
    "fatal: Server does not support shallow clients",
)
THERE = (
    f"fatal: remote error: upload-pack: not our ref {OID}",
    f"fatal: protocol error: want {OID} not valid",
    f"error: missing object referenced by '{OID}'",
)
DAMAGE = (
    f"fatal: packed object {OID} (stored in /c/x.pack) is corrupt",
    f"error: x\nfatal: unable to read tree {OID}",
    f"error: Could not read {OID}",
    f"fatal: failed to unpack tree object {OID}",
    "fatal: not a tree object",
    f"fatal: bad tree object {OID}",
    "fatal: not a git repository: '/c/x.git'",
    "fatal: bad config line 1 in file /c/x.git/config",
    "error: packfile /c/x.pack does not match index",
    "error: file /c/x.pack is far too short to be a packfile",
    "error: index file /c/x.idx is too small",
    "error: remote did not send all necessary objects",
    "error: inflate: data stream error (incorrect data check)",
)
STARVED = (
    "fatal: Out of memory, malloc failed (tried to allocate 9 bytes)",
    "error: x\nfatal: packfile x cannot be mapped: Cannot allocate memory",
    "fatal: unable to create thread: Resource temporarily unavailable",
)
HINDRANCES = {
    "error: unable to create file x: No space left on device": "No space left on device",
    "x\nfatal: cannot create '/c/x/tmp_pack': Read-only file system": "Read-only file system",
    "error: unable to write file x: Disk quota exceeded": "Disk quota exceeded",
    "fatal: cannot open '/c/x.pack': Too many open files": "Too many open files",
    "error: unable to open object pack directory: /c: Input/output error": "Input/output error",
    "error: x\nfatal: read error: Input/output error": "Input/output error",
}
HINDERED = tuple(HINDRANCES)
KILLED = (
    "error: git-remote-https died of signal 9\nfatal: fetch-pack: invalid index-pack output",
    "fatal: fetch-pack: invalid index-pack output",
    "remote: Counting objects: 3, done.\nfatal: fetch-pack: invalid index-pack output",
)
OTHERS = (
    "remote: fatal: sha1 file '<stdout>' write error: No space left on device",
    "",
    f"fatal: bad object {OID}",
    "fatal: Authentication failed for 'https://example.org/x/'",
    "fatal: unable to access 'https://example.org/x/': Failed to connect",
    "fatal: git upload-pack: aborting due to possible repository corruption on the remote side.",
    "remote: fatal: packed object is corrupt",
    "remote: git-pack-objects died of signal 9",
    "fatal: bad pack\nfatal: fetch-pack: invalid index-pack output",
    "fatal: index-pack died of signal 91",
)


class MeaningTests(SynchronousTestCase):
    """Each word means one thing."""

    def test_meanings(self) -> None:
        """What says something is understood, and not as anything else."""
        kinds = (OFFERED, THERE, DAMAGE, STARVED, HINDERED, KILLED, OTHERS)
        for kind in kinds:
            for said in kind:
                self.assertEqual(is_not_offered(said), kind is OFFERED, said)
                self.assertEqual(is_not_there(said), kind is THERE, said)
                self.assertEqual(is_damage(said), kind is DAMAGE, said)
                self.assertEqual(hindrance(said), HINDRANCES.get(said), said)
                self.assertEqual(was_killed(128, said), kind is KILLED, said)
                for serving in (False, True):
                    self.assertEqual(is_starved(said, serving=serving), kind is STARVED, said)

    def test_killed(self) -> None:
        """The exit status tells of git itself, in a sandbox and without one."""
        for status in (-9, 137, -7, 135):
            self.assertTrue(was_killed(status, "fatal: early EOF"))
        for status in (0, 1, 9, -11, 139, 153):
            self.assertFalse(was_killed(status, ""))

    def test_remote(self) -> None:
        """The memory that a server lacks is ours only where we are the server."""
        said = "remote: fatal: Out of memory, malloc failed"
        self.assertFalse(is_starved(said, serving=False))
        self.assertTrue(is_starved(said, serving=True))
