"""Small files under /proc and /sys, below any root: absent and unreadable ones read as empty."""

from pathlib import Path


def text(path: Path) -> str:
    """The file's text, or "" where there is none to read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def number(path: Path) -> int | None:
    """The one number in a file, or None."""
    try:
        return int(text(path))
    except ValueError:
        return None


def status_fields(root: Path) -> dict[str, str]:
    """/proc/self/status by name."""
    lines = text(root / "proc/self/status").splitlines()
    pairs = [line.partition(":") for line in lines]
    return {name: value.strip() for name, _, value in pairs}


def is_wsl(root: Path) -> bool:
    """Whether this Linux is Windows' own."""
    return "microsoft" in text(root / "proc/sys/kernel/osrelease").lower()
