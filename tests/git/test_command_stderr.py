"""`git.command`: the class of each message, all of which a real git has printed."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.git.command import (
    COMMIT_MISSING_PATTERN,
    COMMIT_UNADVERTISED_PATTERN,
    DISK_ERROR_PATTERN,
    REPOSITORY_CORRUPT_PATTERN,
    explain_fetch_failure,
    is_git_killed_by_kernel,
    is_git_memory_exhausted,
)
from tests.fakes.world import OID

ACCESS = "fatal: unable to access 'https://h/x/':"
PAGE = "https://h/x/info/refs not valid: is this a git repository?"
UNADVERTISED = (
    f"error: Server does not allow request for unadvertised object {OID}",
    "fatal: couldn't find remote ref refs/heads/x",
)
MISSING = (
    f"fatal: remote error: upload-pack: not our ref {OID}",
    f"fatal: protocol error: want {OID} not valid",
    f"error: missing object referenced by '{OID}'",
)
CORRUPT = (
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
OUT_OF_MEMORY = (
    "fatal: Out of memory, malloc failed (tried to allocate 9 bytes)",
    "error: x\nfatal: packfile x cannot be mapped: Cannot allocate memory",
    "fatal: unable to create thread: Resource temporarily unavailable",
)
DISK_ERRORS = {
    "error: unable to create file x: No space left on device": "No space left on device",
    "x\nfatal: cannot create '/c/x/tmp_pack': Read-only file system": "Read-only file system",
    "error: unable to write file x: Disk quota exceeded": "Disk quota exceeded",
    "fatal: cannot open '/c/x.pack': Too many open files": "Too many open files",
    "error: unable to open object pack directory: /c: Input/output error": "Input/output error",
    "error: x\nfatal: read error: Input/output error": "Input/output error",
}
KILLED = (
    "error: git-remote-https died of signal 9\nfatal: fetch-pack: invalid index-pack output",
    "fatal: fetch-pack: invalid index-pack output",
    "remote: Counting objects: 3, done.\nfatal: fetch-pack: invalid index-pack output",
)
OTHERS = (
    "fatal: Server does not support shallow clients",
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


class ClassificationTests(SynchronousTestCase):
    def test_each_message_of_git_matches_the_patterns_of_one_class_only(self) -> None:
        classes = (
            UNADVERTISED,
            MISSING,
            CORRUPT,
            OUT_OF_MEMORY,
            tuple(DISK_ERRORS),
            KILLED,
            OTHERS,
        )
        patterns = (
            (COMMIT_UNADVERTISED_PATTERN, UNADVERTISED),
            (COMMIT_MISSING_PATTERN, MISSING),
            (REPOSITORY_CORRUPT_PATTERN, CORRUPT),
        )
        for own in classes:
            for printed in own:
                for pattern, matching in patterns:
                    self.assertEqual(bool(pattern.search(printed)), own is matching, printed)
                disk_error = DISK_ERROR_PATTERN.search(printed)
                self.assertEqual(disk_error and disk_error[1], DISK_ERRORS.get(printed), printed)
                self.assertEqual(is_git_killed_by_kernel(128, printed), own is KILLED, printed)
                for serving in (False, True):
                    self.assertEqual(
                        is_git_memory_exhausted(printed, serving=serving),
                        own is OUT_OF_MEMORY,
                        printed,
                    )

    def test_message_about_failed_fetch_has_gits_reason(self) -> None:
        for printed, words in (
            ("fatal: could not read Username for 'https://h': terminal", "needs credentials"),
            ("remote: x\nfatal: repository 'https://h/x/' not found\n", "does not exist"),
            ("ERROR: Repository not found.\nfatal: Could not read", "does not exist"),
            ("git@h: Permission denied (publickey).\nfatal: x", "needs credentials"),
            (f"{ACCESS} The requested URL returned error: 403", "access (HTTP status 403)"),
            (f"{ACCESS} The requested URL returned error: 301", "has moved (HTTP status 301)"),
            (f"{ACCESS} The requested URL returned error: 302", "a login page (HTTP status 302)"),
            (f"{ACCESS} The requested URL returned error: 303", "(repositories.credentials)"),
            (f"{ACCESS} The requested URL returned error: 307", "use the new URL"),
            (f"{ACCESS} The requested URL returned error: 502", "answer now (HTTP status 502)"),
            (
                "fatal: dumb http transport does not support shallow capabilities",
                "server of plain files",
            ),
            ("fatal: Server does not support shallow clients", "lacks the feature `shallow`"),
            ("fatal: Server does not support shallow requests", "lacks the feature `shallow`"),
            (f"fatal: {PAGE}", "leads to a web page"),
            ("fatal: invalid server response; got '<html>'", "leads to a web page"),
            (
                f"{ACCESS} server certificate verification failed. CAfile: none",
                "could not fetch the repository: unable to access 'https://h/x/': server cert",
            ),
            (
                f"{ACCESS} Failed to connect to h port 1 after 0 ms: Couldn't connect to server",
                "cannot connect to the git server (Couldn't connect to server)",
            ),
            (f"{ACCESS} Failed to connect to h port 1: Could not connect to server", "cannot co"),
            (
                "fatal: unable to connect to h:\nh[0: 127.0.0.1]: errno=Connection refused\n",
                "server (Connection refused)",
            ),
            ("ssh: connect to host h port 22: No route to host\nfatal: x", "(No route to host)"),
            ("Host key verification failed.\nfatal: x", "known_hosts_file"),
            (
                f"error: object {OID}: hasDotgit: contains '.git'\nfatal: fsck error",
                f"repository: object {OID}: hasDotgit: contains '.git'",
            ),
            ("remote: Host key verification failed\nfatal: early EOF", "repository: early EOF"),
            ("remote: x returned error: 301\nfatal: early EOF", "repository: early EOF"),
            (
                "warning: x\nfatal: unable to access 'u': timeout\nx",
                ": unable to access 'u': timeout",
            ),
            ("strange", "; see stderr"),
        ):
            self.assertIn(words, explain_fetch_failure(printed))

    def test_exit_status_of_sigkill_or_sigbus_means_git_was_killed(self) -> None:
        for status in (-9, 137, -7, 135):
            self.assertTrue(is_git_killed_by_kernel(status, "fatal: early EOF"))
        for status in (0, 1, 9, -11, 139, 153):
            self.assertFalse(is_git_killed_by_kernel(status, ""))

    def test_out_of_memory_in_remote_output_counts_only_for_a_local_repository(self) -> None:
        printed = "remote: fatal: Out of memory, malloc failed"
        self.assertFalse(is_git_memory_exhausted(printed, serving=False))
        self.assertTrue(is_git_memory_exhausted(printed, serving=True))
