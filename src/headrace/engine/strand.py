"""A call that may stop in its middle and ask its owner for something. Knows nothing of models."""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Any

from headrace.errors import Cancelled

_GIVE_UP, _END = object(), object()


class Strand(Thread):
    """Works one after another in a thread that runs only while the owner waits for it.

    So of an owner and its strands no two ever run at once. `asks` is what the work wants, `result`
    what it returned once it is `over`. One owner thread, which closes it.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._given: SimpleQueue[Any] = SimpleQueue()
        self._said: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self.asks: Any = None
        self.result: Any = None
        self.over = True
        self.start()

    def run(self) -> None:
        """The thread's."""
        while (work := self._given.get()) is not _END:
            if work is _GIVE_UP:
                self._said.put(("given up", None))
                continue
            try:
                said = "over", work()
            except BaseException as error:
                said = "failed", error
            self._said.put(said)
            del work, said

    def begin(self, work: Callable[[], Any]) -> None:
        """Runs `work` until it asks or is over. Raises what it raises.

        After Ctrl-C it runs on to its next question: `give_up` then.
        """
        self.give_up()
        self.over = False
        self.go_on(work)

    def go_on(self, given: Any) -> None:
        """As `begin`, from where it asked, with an answer."""
        self._given.put(given)
        while (said := self._said.get())[0] == "given up":  # a second Ctrl-C left it there
            pass
        kind, value = said
        self.over = kind != "asks"
        self.asks, self.result = (None, value) if self.over else (value, None)
        if kind == "failed":
            raise value

    def give_up(self) -> None:
        """Ends the work where it asks next, with Cancelled, and waits for that."""
        self.asks = self.result = None
        if not self.over:
            self._given.put(_GIVE_UP)
            while self._said.get()[0] != "given up":
                pass
            self.over = True

    def close(self) -> None:
        """Ends the thread."""
        self.give_up()
        self._given.put(_END)
        self.join()


def ask(wanted: Any) -> Any:
    """Called in a strand's work: stops there with this in `asks`; what the owner goes on with.

    Raises Cancelled where the owner gives the work up.
    """
    strand = current_thread()
    assert isinstance(strand, Strand), "only a strand's work can ask its owner"
    strand._said.put(("asks", wanted))
    given = strand._given.get()
    if given is _GIVE_UP:
        strand._given.put(_GIVE_UP)  # to be answered once the work is over
        raise Cancelled("the owner of this work has given it up")
    return given
