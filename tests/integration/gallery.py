"""Take the pictures of docs/gallery.md: `make gallery`.

A daemon has three of the example problems and a package, and a browser goes through the page as a
student and a teacher do.
"""

from __future__ import annotations

import json
import shutil
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import react

from tests.integration.browser import DESKTOP, MISSING, PHONE, Browser
from tests.integration.browser_case import PROBLEMS
from tests.integration.harness import CONFIGURATION, Daemon
from tests.integration.repositories import GitRepository
from tests.integration.test_packages import GRADED
from tests.integration.unprivileged import temporary_folder

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
CHOSEN = {"inversions": "source", "knights_tour": "tour", "word_count": "source"}
"""The problems of the pictures, and the field of each."""
CLASS = {
    "ann": "right_merge.py",
    "ben": "slow_pairs.cpp",
    "carla": "wrong_overflow.cpp",
    "dan": "broken_syntax.py",
}
"""The solution of Inversions of each student."""
PACKAGE, PACKAGE_SOLUTION = GRADED, "submissions/partially_accepted/small.py"
STATEMENT = """# Echo

Print the number of the input, up to 99.

- **easy**, 40 points: up to 9
- **hard**, 60 points
"""


def configure(repository: GitRepository) -> str:
    """Return a configuration with the problems."""
    for path, content in PACKAGE.items():
        repository.write(f"echo/{path}", content)
    repository.write("echo/statement.md", STATEMENT)
    commit = repository.commit()
    echo = (
        "[problems.echo]\n"
        f"repository = '{repository.url}'\ncommit = '{commit}'\ndirectory = 'echo'\n"
        "build = 'tawebeval-judge --build'\ncommand = 'tawebeval-judge'\nfields = ['source']\n"
        "title = 'Echo'\nstatement = 'statement.md'\nown_input = true\n"
    )
    tables = [CONFIGURATION, echo]
    for name, field in CHOSEN.items():
        place = PROBLEMS / name
        problem = tomllib.loads((place / "problem.toml").read_text())
        tables.append(
            f"[problems.{name}]\n"
            f"repository = '{repository.url}'\ncommit = '{commit}'\ndirectory = '{name}'\n"
            f"command = '''{problem['evaluator_cmd']}'''\nfields = ['{field}']\n"
            f"title = {json.dumps(problem['title'])}\nstatement = 'statement.md'\n"
        )
    return "\n".join(tables)


async def take_pictures(browser: Browser, url: str, folder: Path) -> None:
    """Go through the page, and write a picture of each state."""
    await browser.look(DESKTOP, "light")
    await browser.open(url)
    await browser.shows("#problem-list", "Inversions")
    await browser.photograph("gallery-problems", IMAGES)
    await submit(browser, "inversions", "right_merge.py")
    await browser.photograph("gallery-result", IMAGES)
    await submit(browser, "echo", "small.py", PACKAGE[PACKAGE_SOLUTION])
    await browser.photograph("gallery-package", IMAGES)
    await submit(browser, "knights_tour", "right_open.txt")
    await browser.photograph("page", IMAGES)
    await browser.look(DESKTOP, "dark")
    await browser.photograph("gallery-dark", IMAGES)
    await browser.look(PHONE, "light")
    await submit(browser, "inversions", "slow_pairs.cpp")
    await browser.photograph("gallery-phone", IMAGES)
    await browser.look(DESKTOP, "light")
    await browser.click("#to-listing")
    await browser.shows("#listing", "Inversions")
    await browser.photograph("gallery-history", IMAGES)
    await evaluate_class(browser, url, folder)
    await browser.photograph("gallery-class", IMAGES)


async def evaluate_class(browser: Browser, url: str, folder: Path) -> None:
    """Evaluate a ZIP file with a solution of each student."""
    with zipfile.ZipFile(folder / "homework.zip", "w") as archive:
        for student, solution in CLASS.items():
            path = PROBLEMS / "inversions" / "solutions" / solution
            archive.write(path, f"{student}/{solution}")
    await browser.open(f"{url}#class")
    await browser.until("document.querySelector('#class-problem option[value=inversions]')")
    await browser.script(
        "const select = document.querySelector('#class-problem'); select.value = 'inversions';"
        "select.dispatchEvent(new Event('change', { bubbles: true }))"
    )
    await browser.write("#class-zip", str(folder / "homework.zip"))
    await browser.shows("#class-start", "Evaluate")
    await browser.click("#class-start")
    total = len(CLASS)
    await browser.shows("#class-count", f"{total} of {total}")


async def submit(browser: Browser, name: str, solution: str, content: str | None = None) -> None:
    """Put a solution of a problem into the editor, and have it judged."""
    if content is None:
        content = (PROBLEMS / name / "solutions" / solution).read_text()
    await browser.script("location.hash = `#problem/${arguments[0]}`", name)
    await browser.until("form.checkVisibility() && document.querySelector('#statement-text p')")
    await browser.script(
        """
        const dataTransfer = new DataTransfer();
        dataTransfer.items.add(new File([arguments[1]], arguments[0]));
        dispatchEvent(new DragEvent("drop", { dataTransfer }));
        """,
        solution,
        content,
    )
    await browser.until("document.querySelector('.file-name').value === arguments[0]", solution)
    await browser.until("document.querySelector('.content').value !== ''")
    await browser.click("#submit")
    await browser.shows("#state", "finished")
    await browser.script("scrollTo(0, 0)")


async def main() -> None:
    """Take the pictures with a daemon and a browser of their own."""
    folder = temporary_folder()
    daemon, browser = None, None
    try:
        repository = GitRepository(folder / "repository")
        shutil.copytree(PROBLEMS, repository.folder, dirs_exist_ok=True)
        daemon = Daemon(configure(repository))
        daemon.start()
        await daemon.ready()
        browser = Browser()
        await take_pictures(browser, f"{daemon.url}/", folder)
        await browser.open("about:blank")
    finally:
        if browser is not None:
            browser.quit()
        if daemon is not None:
            daemon.remove()
        shutil.rmtree(folder, ignore_errors=True)


def run(reactor: Any) -> Deferred[None]:
    """Return when all pictures are taken."""
    return Deferred.fromCoroutine(main())


if __name__ == "__main__":
    if MISSING:
        sys.exit(f"there is no {', no '.join(MISSING)}")
    react(run)
