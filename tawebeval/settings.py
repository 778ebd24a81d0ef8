"""What the configuration is made of: tables, and the kinds of values that settings have."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from tawebeval.callers import NAME

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

Count = Annotated[int, Meta(ge=1, le=10**9)]
Bytes = Annotated[int, Meta(ge=KIB, le=2**50)]
Host = Annotated[str, Meta(pattern=r"^(\*\.)?[A-Za-z0-9_.:-]+\Z")]
Seconds = Annotated[float, Meta(gt=0, le=10**9)]

# Written plainly, so that what is mounted there is what stands there.
AbsolutePath = Annotated[str, Meta(pattern=r"^(/(?!\.{1,2}(/|\Z))[^/\0]+)+\Z")]
# A file of a secret: a path, or the name of what systemd hands over. ssh would take more than
# these characters apart.
SecretFile = Annotated[str, Meta(pattern=r"^(/?[A-Za-z0-9_@+.,:=-]+(/[A-Za-z0-9_@+.,:=-]+)*)?\Z")]
Share = Annotated[int, Meta(ge=0, le=10**6)]
ByteShare = Annotated[int, Meta(ge=0, le=2**50)]
CallerName = Annotated[str, Meta(pattern=rf"^{NAME.pattern}\Z")]
# As browsers write it: in lower case, and without a slash at the end.
Origin = Annotated[
    str, Meta(pattern=r"^(\*|[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?)\Z")
]


class Section(Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the file; what it does not know is an error."""
