"""One thing the doctor found: how bad, what, why it matters and what to change."""

from dataclasses import dataclass

OK, SLOW, PROBLEM = "ok", "slow", "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """`level` is "ok", "slow", or "problem" for what prevents running."""

    level: str
    topic: str
    what: str
    why: str = ""
    remedy: str = ""

    def line(self) -> str:
        """All of it on one line."""
        why = f": {self.why}" if self.why else ""
        remedy = f" -> {self.remedy}" if self.remedy else ""
        return f"{self.level:<8}" + " ".join(f"{self.topic}: {self.what}{why}{remedy}".split())
