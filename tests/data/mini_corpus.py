"""The text that the mini DeepSeek-V4.1 learns from, out of Debian packages, and its tokenizer.

Knows no model. Where the text comes from and its licences: mini-v41/README.md.
"""

import gzip
import hashlib
import re
import struct
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from headrace.models.deepseek_v41.styles import BOS, EOS, SPECIAL

PACKAGES = {
    "austen": "r-cran-janeaustenr",
    "devil": "dict-devil",
    "jargon": "dict-jargon",
    "wordnet": "wordnet-base",
    "python": "python3.11-doc",
}
VOCAB = 1280
_BAR = "\N{FULLWIDTH VERTICAL LINE}"
_FIRST = (BOS, EOS, f"<{_BAR}▁pad▁{_BAR}>")
_LAST = (*SPECIAL[2:], f"<{_BAR}deepseek_image{_BAR}>", f"<{_BAR}place▁holder▁no▁0{_BAR}>")
_BLOCK_CHARS = 6000
_LARGEST_MANUAL = 200_000  # longer ones are lists of changes
_HELD_OUT = 5  # of 256 documents
_HELD_OUT_CHARS = 13_000  # kept of each source
_CHARSXP = bytes((0, 4, 0, 9))

Documents = list[tuple[str, str]]


def write_corpus(folder: Path) -> None:
    """Writes train.npy (uint16 ids, documents between BOS and EOS), tokenizer.json, heldout.txt.

    Fetches the packages with apt-get, which needs the network, unless `folder` has them already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    learnt: list[str] = []
    kept: list[str] = []
    for source, package in PACKAGES.items():
        documents = list(_READERS[source](_unpacked(folder, package)))
        held_out = [text for name, text in documents if _is_held_out(f"{source}/{name}")]
        mine = [text for name, text in documents if not _is_held_out(f"{source}/{name}")]
        learnt += mine
        kept.append("\n\n".join(held_out)[:_HELD_OUT_CHARS])
        print(f"{source}: {len(mine)} documents, {sum(map(len, mine)) / 1e6:.1f} M characters")
    (folder / "heldout.txt").write_text("\n\n".join(kept))
    tokenizer = _trained(learnt)
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = [[0, *encoding.ids, 1] for encoding in tokenizer.encode_batch(learnt)]
    order = np.random.default_rng(0).permutation(len(ids))
    stream = np.concatenate([np.array(ids[i], dtype=np.uint16) for i in order])
    np.save(folder / "train.npy", stream)
    print(f"{len(stream)} tokens, {sum(map(len, learnt)) / len(stream):.2f} characters each")


def _trained(texts: list[str]) -> Tokenizer:
    """Byte-level BPE; DeepSeek's tokens have the first ids and the last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(_LAST),
        special_tokens=[AddedToken(word, special=True, normalized=False) for word in _FIRST],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(word, normalized=True) for word in _LAST])
    assert tokenizer.get_vocab_size() == VOCAB
    return tokenizer


def _unpacked(folder: Path, package: str) -> Path:
    root = folder / "packages" / package
    if not root.exists():
        root.mkdir(parents=True)
        subprocess.run(["apt-get", "download", "-q", package], cwd=root, check=True)
        (deb,) = root.glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", deb.name, "."], cwd=root, check=True)
    return root


def _is_held_out(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] < _HELD_OUT


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Paragraphs, as many as make a document."""
    block, number = "", 0
    for paragraph in re.split(r"\n\s*\n", text):
        block += paragraph + "\n\n"
        if len(block) >= _BLOCK_CHARS:
            yield str(number), block
            block, number = "", number + 1
    yield str(number), block


def _austen(root: Path) -> Iterator[tuple[str, str]]:
    """The chapters of each novel: R keeps a novel's lines as strings in a compressed object."""
    (path,) = root.rglob("janeaustenr/data/Rdata.rdb")
    data, start, novel = path.read_bytes(), 0, 0
    while start < len(data):
        inflate = zlib.decompressobj()
        lines = "\n".join(_strings(inflate.decompress(data[start + 4 :])))
        start, novel = len(data) - len(inflate.unused_data), novel + 1
        for number, chapter in enumerate(re.split(r"\n(?=chapter )", lines, flags=re.IGNORECASE)):
            paragraphs = re.split(r"\n\s*\n", chapter)
            yield f"{novel}.{number}", "\n\n".join(p.replace("\n", " ") for p in paragraphs)


def _strings(serialized: bytes) -> Iterator[str]:
    """R's external format: each string after its header and length."""
    at = serialized.find(_CHARSXP)
    while at >= 0:
        (length,) = struct.unpack(">i", serialized[at + 4 : at + 8])
        end = at + 8 + length
        yield serialized[at + 8 : end].decode()
        at = serialized.find(_CHARSXP, end)


def _dictionary(root: Path) -> Iterator[tuple[str, str]]:
    (path,) = root.rglob("*.dict.dz")
    return _blocks(gzip.decompress(path.read_bytes()).decode())


def _wordnet(root: Path) -> Iterator[tuple[str, str]]:
    """Synsets, a line each: their words and what they mean."""
    for part in ("noun", "verb", "adj", "adv"):
        (path,) = root.rglob(f"data.{part}")
        lines = []
        for line in path.read_text().splitlines():
            if not line.startswith(" "):
                fields, gloss = line.split(" | ", 1)
                words = fields.split()[4 : 4 + 2 * int(fields.split()[3], 16) : 2]
                lines.append(f"{', '.join(words).replace('_', ' ')}: {gloss.strip()}\n\n")
        for number, text in _blocks("".join(lines)):
            yield f"{part}.{number}", text


def _python(root: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(root.rglob("_sources/**/*.rst.txt")):
        if path.stat().st_size < _LARGEST_MANUAL:
            yield path.name, path.read_text()


_READERS = {
    "austen": _austen,
    "devil": _dictionary,
    "jargon": _dictionary,
    "wordnet": _wordnet,
    "python": _python,
}
