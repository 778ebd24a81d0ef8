"""`evaluations.command_hints`: what the files of a command tell about its bad exit."""

from __future__ import annotations

import subprocess
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.evaluations.command_hints import find_command_hint

_SCRIPT = "#!/bin/sh\nset -e\nfor i in 1 2; do\n  echo $i\ndone\nexit 1\n"
_FILES = {
    "windows.sh": _SCRIPT.replace("\n", "\r\n"),
    "windows.py": "#!/usr/bin/env python3\r\nprint(1)\r\nraise SystemExit(1)\r\n",
    "plain.sh": _SCRIPT,
    "judge": _SCRIPT,
    "bom.sh": f"\ufeff{_SCRIPT}",
    "bom.py": "\ufeff#!/usr/bin/env python3\nprint('a', 'b')\n",
    "no_interpreter.py": "import os\nprint(\n",
    "unknown.py": "#!/usr/bin/python3.99\n",
    "directory/judge.sh": "#!/bin/sh\nmissing.sh\n",
}
_CRLF = "windows.sh has the line ends of Windows (CRLF): run `sed -i 's/\\r$//' "
# Each command, and the beginning of its hint.
_COMMANDS = (
    ("./windows.sh", f"./{_CRLF}./windows.sh`, add the line `*.sh text eol=lf` to .gitattributes"),
    ("sh windows.sh", _CRLF),
    ("bash windows.sh; exit 1", _CRLF),
    ("./windows.py", "./windows.py has the line ends of Windows"),
    ("python3 windows.py", ""),
    (
        "printf '#!/bin/sh\\r\\n\\r\\n' >x; bash $PWD/x",
        "a script has the line ends of Windows (CRLF)",
    ),
    (
        "plain.sh",
        "plain.sh is not a path, so the shell looked for a program of that name: write ./",
    ),
    ("true && plain.sh", "plain.sh is not a path"),
    ("judge", "judge is not a path"),
    ("windows.sh", "windows.sh is not a path"),
    (
        "./bom.sh",
        "./bom.sh begins with a byte order mark (BOM), so its first line is not read: save",
    ),
    ("sh bom.sh", "bom.sh begins with a byte order mark"),
    ("bash bom.sh", "bom.sh begins with a byte order mark"),
    ("./bom.py", "./bom.py begins with a byte order mark"),
    ("./utf16.sh", "./utf16.sh begins with a byte order mark"),
    ("./no_interpreter.py", "the shell executed ./no_interpreter.py, which has no interpreter"),
    ("./unknown.py", "./unknown.py begins with #!/usr/bin/python3.99, which is not installed here"),
    ("./untracked.sh", "the commit has no file ./untracked.sh in its root: check the path, or add"),
    ("sh untracked.sh", "the commit has no file untracked.sh"),
    ("bash ./untracked.sh", "the commit has no file ./untracked.sh"),
    ("python3 untracked.py", "the commit has no file untracked.py"),
    ("gcc untracked.c -o judge && ./judge", "the commit has no file untracked.c"),
    ("./directory", "./directory is a directory"),
    ("sh directory/judge.sh", ""),
    ("cd directory && ./untracked.sh", ""),
    ("./plain.sh", ""),
    ("gcc", ""),
    ("echo 'open", ""),
    ("../outside.sh", ""),
    ("./link.sh", ""),
    ("./circle.sh", ""),
    ("unknown-command", ""),
)


class CommandHintTests(SynchronousTestCase):
    """Commands that the shell of this machine runs among a few files."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).resolve()
        for name, content in _FILES.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode())
            path.chmod(0o755)
        (self.root / "utf16.sh").write_bytes(_SCRIPT.encode("utf-16"))
        (self.root / "utf16.sh").chmod(0o755)
        (self.root / "link.sh").symlink_to("/etc/hostname")
        (self.root / "circle.sh").symlink_to("circle.sh")

    def run_command(self, command: str) -> tuple[int, str]:
        """Return the exit status and stderr."""
        ran = subprocess.run(
            ["/bin/sh", "-c", command],
            cwd=self.root,
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
        )
        return ran.returncode, ran.stderr.decode()

    def test_hint_fits_what_the_shell_says(self) -> None:
        """No command of the table succeeds, but for one that Python can run."""
        for command, words in _COMMANDS:
            status, stderr = self.run_command(command)
            hint = find_command_hint(command, self.root, "", status, stderr)
            self.assertEqual(hint[: len(words)] if words else hint, words, (command, stderr))

    def test_path_is_relative_to_the_directory(self) -> None:
        """A file of the root is not that of the evaluator's directory."""
        stderr = "sh: 0: cannot open plain.sh: No such file"
        found = find_command_hint("sh plain.sh", self.root, "directory", 2, stderr)
        self.assertIn("no file plain.sh in directory", found)
