"""What the world did to us: the codes of docs/errors.md. A miss is not an error."""

from __future__ import annotations


class KvError(Exception):
    """A stable code, and one line that says what, where and how to mend it. Code reacts to the code, never to the message."""

    def __init__(self, code: str, message: str, *, retry: bool = False, tier: str = "") -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        #: The same call may succeed later.
        self.retry = retry
        self.tier = tier

    def again(self) -> KvError:
        """The same for another caller: a raised error keeps where it was raised."""
        return KvError(self.code, self.message, retry=self.retry, tier=self.tier)
