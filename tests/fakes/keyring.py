"""A keyring in memory."""

from __future__ import annotations


class FakeKeyring:
    """A backend of the package keyring. `error` is what each call raises, None for nothing."""

    def __init__(self) -> None:
        self.passwords: dict[tuple[str, str], str] = {}
        self.priority = 5.0
        self.error: Exception | None = None

    def get_password(self, service: str, account: str) -> str | None:
        self._fail()
        return self.passwords.get((service, account))

    def set_password(self, service: str, account: str, password: str) -> None:
        self._fail()
        self.passwords[service, account] = password

    def delete_password(self, service: str, account: str) -> None:
        self._fail()
        del self.passwords[service, account]

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error
