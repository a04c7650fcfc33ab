"""What a client is told."""

from __future__ import annotations


class Refused(Exception):
    """A request that cannot be done as it was asked, with the remedy; clients repeat none with this HTTP `status`.

    With 429 they do, `after_s` seconds later if that is given.
    """

    def __init__(self, what: str, *, status: int = 400, after_s: int | None = None) -> None:
        super().__init__(what)
        self.status, self.after_s = status, after_s
