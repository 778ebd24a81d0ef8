"""`tawebeval.gitwords`: what git's words mean, each said by a real git once."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.gitwords import hindrance, is_damage, is_not_offered, is_not_there, is_starved

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
}
HINDERED = tuple(HINDRANCES)
OTHERS = (
    "remote: fatal: sha1 file '<stdout>' write error: No space left on device",
    "",
    f"fatal: bad object {OID}",
    "fatal: Authentication failed for 'https://example.org/x/'",
    "fatal: unable to access 'https://example.org/x/': Failed to connect",
    "fatal: git upload-pack: aborting due to possible repository corruption on the remote side.",
    "remote: fatal: packed object is corrupt",
)


class MeaningTests(SynchronousTestCase):
    """Each word means one thing."""

    def test_meanings(self) -> None:
        """What says something is understood, and not as anything else."""
        kinds = (OFFERED, THERE, DAMAGE, STARVED, HINDERED, OTHERS)
        for kind in kinds:
            for said in kind:
                self.assertEqual(is_not_offered(said), kind is OFFERED, said)
                self.assertEqual(is_not_there(said), kind is THERE, said)
                self.assertEqual(is_damage(said), kind is DAMAGE, said)
                self.assertEqual(hindrance(said), HINDRANCES.get(said), said)
                for serving in (False, True):
                    self.assertEqual(is_starved(said, serving=serving), kind is STARVED, said)

    def test_remote(self) -> None:
        """The memory that a server lacks is ours only where we are the server."""
        said = "remote: fatal: Out of memory, malloc failed"
        self.assertFalse(is_starved(said, serving=False))
        self.assertTrue(is_starved(said, serving=True))
