"""Server-sent events, from bytes as they arrive."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventParser:
    """Cuts a stream of bytes into the data of its events, wherever the network has split it.

    Follows the event stream format of the HTML standard; fields other than `data` are of no interest here.
    """

    def __init__(self) -> None:
        self._rest = b""  # of a line whose end has not come
        self._data: list[bytes] = []  # lines of an event whose end has not come
        self._started = self._after_return = False

    def feed(self, chunk: bytes) -> list[str]:
        """The data of the events that `chunk` completes. Mutates."""
        if self._after_return:  # a \n that belongs to the \r before it
            chunk = chunk.removeprefix(b"\n")
            self._after_return = False
        if not chunk:
            return []
        lines = (self._rest + chunk).splitlines(keepends=True)  # of bytes: at \n, \r and \r\n alone
        self._after_return = lines[-1].endswith(b"\r")
        self._rest = b"" if lines[-1].endswith((b"\n", b"\r")) else lines.pop()
        events = (self._line(line.rstrip(b"\r\n")) for line in lines)
        return [event for event in events if event is not None]

    def close(self) -> list[str]:
        """The data of an event that the stream broke off before its empty line. Mutates."""
        lines = [self._rest, b""]
        self._rest = b""
        events = (self._line(line) for line in lines)
        return [event for event in events if event is not None]

    def _line(self, line: bytes) -> str | None:
        """The event's data, if this line is the empty one that ends it."""
        if not self._started:
            line = line.removeprefix(BYTE_ORDER_MARK)
            self._started = True
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
        elif line == b"data":
            self._data.append(b"")
        elif not line and self._data:
            data = b"\n".join(self._data)
            self._data = []
            return data.decode(errors="replace")
        return None
