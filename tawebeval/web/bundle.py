"""The page's modules and style sheets in one file of each kind, which browsers keep for ever.

The page has some thirty modules. A browser that asks for each is slow on its first visit, and asks
again for each on the next. So modules are joined when the daemon starts, each in a function of its
own, and all URLs name the version of their content. Modules import names from `./NAME.js` at their
top, and export functions, classes and constants where they are declared. The module `messages.js`
is made of the tables in `messages`, one for each language.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import sha256

_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([a-z]+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function\*?|class|const) (\w+))", re.MULTILINE)
_MODULE_URL = re.compile(r'(import\("\./)([\w.-]+)(?="\))')
_PAGE_URL = re.compile(r'((?:href|src)="static/)([\w.-]+)(?=")')


def bundle_modules(modules: Mapping[str, str], entry: str) -> str:
    """Return a module that has the effect of `entry`, with all modules that it imports."""
    scopes: dict[str, str] = {}

    def add(name: str) -> None:
        text = modules[f"{name}.js"]
        for _, other in _IMPORT.findall(text):
            if other not in scopes:
                add(other)
        exported = ", ".join(_EXPORT.findall(text))
        text = _IMPORT.sub(r"const {\1} = \2_module;\n", _EXPORT.sub("", text))
        scopes[name] = (
            f"const {name}_module = (() => {{\n{text}\nreturn {{ {exported} }};\n}})();\n"
        )

    add(entry)
    return "\n".join(scopes.values())


def bundle_static_files(
    files: Mapping[str, str], styles: Sequence[str], tables: Mapping[str, str]
) -> dict[str, str]:
    """Return the files that take the place of others, or are new, by name."""
    versions = {name: compute_content_version(text.encode()) for name, text in files.items()}

    def add_version(found: re.Match[str]) -> str:
        return f"{found[0]}?v={versions[found[2]]}"

    modules = {**files, "messages.js": make_messages_module(tables)}
    made = {
        "bundle.js": _MODULE_URL.sub(add_version, bundle_modules(modules, "page")),
        "bundle.css": "".join(files[name] for name in styles),
    }
    versions |= {name: compute_content_version(text.encode()) for name, text in made.items()}
    pages = {
        name: _PAGE_URL.sub(add_version, text)
        for name, text in files.items()
        if name.endswith(".html")
    }
    return {**made, **pages}


def make_messages_module(tables: Mapping[str, str]) -> str:
    """Return the module with all messages, from the JSON of each language's table."""
    members = (f'"{language}": {table}' for language, table in sorted(tables.items()))
    return f"export const TABLES = {{{','.join(members)}}};\n"


def compute_content_version(content: bytes) -> str:
    """Return the version that URLs of a content have."""
    return sha256(content).hexdigest()[:32]
