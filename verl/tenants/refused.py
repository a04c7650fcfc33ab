"""What a client is told."""

from __future__ import annotations


class Refused(Exception):
    """A request that cannot be done as it was asked, with the remedy; clients repeat none with this HTTP `status`."""

    def __init__(self, what: str, *, status: int = 400) -> None:
        super().__init__(what)
        self.status = status
