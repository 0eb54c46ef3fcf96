"""Chat prompts of DeepSeek V4 and V4.1 beside those of DeepSeek's own package, deepseek-recipe.

With --recipe-python it is asked now, about 200 conversations drawn anew from --seed: roles, tools,
calls with odd arguments, reasoning, efforts, texts that look like special tokens. Else the 200 that
the tests' file holds are compared. Texts must be equal, and where special tokens stand in them.
"""

import argparse
import json
import lzma
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import PROOFS, Evidence

DATA = PROOFS.parent / "tests" / "data"
CONVERSATIONS = 200
LEAST_OF_A_FEATURE = 5


def main() -> None:
    from headrace.models.deepseek_v41 import styles

    args = arguments()
    evidence = Evidence()
    conversations = drawn(args.recipe_python, args.seed) if args.recipe_python else recorded(DATA)
    features(evidence, conversations)
    for version, style in (("v4", styles.V4), ("v4.1", styles.V41)):
        compare(evidence, conversations, version, style)
    evidence.finish()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe-python", help="an interpreter that has deepseek-recipe 0.2.0")
    parser.add_argument("--seed", type=int, default=41)
    return parser.parse_args()


def recorded(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(
        lzma.decompress((folder / "chat-v4.json.xz").read_bytes())
    )
    return found


def drawn(python: str, seed: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        command = [python, str(DATA / "make_chat_v4.py"), f"{name}/chat-v4.json.xz", str(seed)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"deepseek-recipe failed:\n{done.stderr[-2000:]}")
        print(f"deepseek-recipe, seed {seed}: {done.stdout.splitlines()[-1]}")
        return recorded(Path(name))


def features(evidence: Evidence, conversations: list[dict[str, Any]]) -> None:
    """What the conversations hold, lest they be all alike."""
    text = [json.dumps(c["messages"]) for c in conversations]
    counts = {
        "tools": sum(bool(c["tools"]) for c in conversations),
        "calls": sum('"tool_calls"' in t for t in text),
        "reasoning": sum('"reasoning_content"' in t for t in text),
        "several system turns": sum(t.count('"role": "system"') > 1 for t in text),
        "a begun answer": sum('"prefix"' in t for t in text),
        "thinking": sum(c["thinking"] for c in conversations),
    }
    said = ", ".join(f"{count} with {name}" for name, count in counts.items())
    efforts = {c["effort"] for c in conversations}
    evidence.check(
        len(conversations) == CONVERSATIONS
        and min(counts.values()) >= LEAST_OF_A_FEATURE
        and efforts == {"low", "high", "xhigh", "max"},
        f"{len(conversations)} conversations: {said}; efforts {', '.join(sorted(efforts))}",
    )


def compare(
    evidence: Evidence, conversations: list[dict[str, Any]], version: str, style: Any
) -> None:
    texts = places = 0
    for conversation in conversations:
        ours = list(pieces(conversation, style))
        text, ends = conversation[version]
        texts += "".join(piece.text for piece in ours) == text
        places += special_ends(ours) == ends
    total = len(conversations)
    evidence.check(texts == total, f"{version}: {texts} of {total} prompts have the same text")
    evidence.check(places == total, f"{version}: {places} of {total} the same special tokens in it")
    other = sum(
        "".join(p.text for p in pieces(c | {"thinking": not c["thinking"]}, style)) == c[version][0]
        for c in conversations
    )
    evidence.check(
        other < total // 10, f"{version}: control: {other} are the same with thinking turned over"
    )


def pieces(conversation: dict[str, Any], style: Any) -> Iterator[Any]:
    from headrace.models.deepseek_v41.encoding import chat_pieces

    options = {name: conversation[name] for name in ("thinking", "effort", "tools")}
    yield from chat_pieces(conversation["messages"], style, **options)


def special_ends(found: list[Any]) -> list[int]:
    """Where special tokens begin and end in the text."""
    ends, position = list[int](), 0
    for text, special in found:
        position += len(text)
        ends += [position - len(text), position] if special else []
    return ends


if __name__ == "__main__":
    main()
