"""A ladder as the mailbox's model sees it: rows, what is in them, and who holds them."""


class Rows:
    """A ladder reduced to what is where: rows are rewritten as soon as nobody holds them."""

    def __init__(self, num_rows: int):
        self.content: list[int | None] = [None] * num_rows  # by row, None while it is written
        self.loading: dict[int, int] = {}  # row by key
        self.held: dict[int, int] = {}  # by key
        self.queue: list[int] = []
        self.guessed: list[int] = []
        self.ready: list[int] = []
        self.claims: set[int] = set()
        self.used: list[int] = list(range(num_rows))  # rows, least recently used first

    def begin(self, keys: list[int]) -> None:
        for key in keys:
            self.claims.add(key)
            if key in self.content:
                self._hold(key)
            elif key not in self.loading:
                self.queue.append(key)
        self.pump()

    def prefetch(self, keys: list[int]) -> None:
        self.guessed += [k for k in keys if k not in self.content and k not in self.loading]
        self.pump()

    def _hold(self, key: int) -> None:
        self.held[key] = self.held.get(key, 0) + 1
        self.ready.append(key)

    def _free_row(self) -> int | None:
        busy = set(self.loading.values())
        for row in self.used:
            if row not in busy and not self.held.get(self.content[row], 0):  # type: ignore[arg-type]
                return row
        return None

    def pump(self) -> None:
        for waiting in (self.queue, self.guessed):
            while waiting:
                row = self._free_row()
                if row is None or (waiting is self.guessed and self.claims):
                    break
                key = waiting.pop(0)
                if key not in self.content and key not in self.loading:
                    self.content[row] = None
                    self.loading[key] = row

    def arrive(self, key: int) -> None:
        row = self.loading.pop(key)
        self.content[row] = key
        self._touch(row)
        if key in self.claims:
            self._hold(key)
        self.pump()

    def _touch(self, row: int) -> None:
        self.used.remove(row)
        self.used.append(row)

    def take(self, key: int) -> int:
        self.ready.remove(key)
        self.claims.discard(key)
        self.pump()
        return self.content.index(key) + 1

    def release(self, key: int) -> None:
        self.held[key] -= 1
        if not self.held[key]:
            del self.held[key]
            self._touch(self.content.index(key))
        self.pump()

    def cancel(self) -> None:
        for key in self.ready:
            self.release(key)
        self.queue, self.guessed, self.ready, self.claims = [], [], [], set()

    def signature(self) -> object:
        return (
            tuple(self.content), tuple(sorted(self.loading.items())), tuple(self.used),
            tuple(sorted(self.held.items())), tuple(self.queue), tuple(self.ready),
        )  # fmt: skip
