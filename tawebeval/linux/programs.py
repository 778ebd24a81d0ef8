"""Programs of some modules of tawebeval: archives (zipapp) or directories that Python executes.

They run with `python3 -I -S`, where tawebeval is not installed: as another user, on another
machine, or for longer than this version is installed. Their modules import the standard library,
and each other.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile, ZipInfo


def collect_program(*modules: ModuleType) -> Mapping[str, bytes]:
    """Return the files of a program: `main()` of the first module, which imports the others.

    Called when the daemon begins: later its user may lack the permission to read the sources.
    """
    files = {"__main__.py": f"from {modules[0].__name__} import main\n\nmain()\n".encode()}
    for module in modules:
        path = module.__name__.replace(".", "/")
        files[f"{path}.py"] = Path(module.__file__ or "").read_bytes()
        files |= {f"{parent}/__init__.py": b"" for parent in list(Path(path).parents)[:-1]}
    return files


def pack_program(*modules: ModuleType) -> bytes:
    """Return the archive of a program, of the files of `collect_program`."""
    archive = io.BytesIO()
    with ZipFile(archive, "w") as file:
        for name, content in collect_program(*modules).items():
            file.writestr(ZipInfo(name), content)  # without the present time
    return archive.getvalue()
