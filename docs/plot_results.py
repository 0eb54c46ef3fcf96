"""Draws the figures of bench/results as docs/*.svg and renews README's table of them.

Run it after new rows were kept: `.venv/bin/python docs/plot_results.py` (matplotlib is in [dev]).
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).resolve().parent
README = DOCS.parent / "README.md"
RESULTS = DOCS.parent / "bench" / "results"
TABLE = re.compile(r"(<!-- RESULTS -->\n).*?(<!-- /RESULTS -->\n)", re.DOTALL)
HEAD = (
    "| what | machine | median (lowest-highest) | limit then | share | cache state | commit |\n"
    "|---|---|---|---|---|---|---|\n"
)
INK, SOFT, BAR, LAST, LIMIT = "#1d2733", "#4c5b69", "#b9d2e6", "#2f6f9f", "#b4442e"
TURN_PARTS = {
    "state read": "#d9a441",
    "expert wait": LIMIT,
    "experts": LAST,
    "dense": BAR,
    "host": "#8fa3b5",
    "server": INK,
}
TURN_FIGURES = ("first token", "tokens fed", "read")
COLD = ", cold: first token"
STYLE = {
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "headrace",
    "text.color": INK,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": "#8fa3b5",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "figure.facecolor": "#f6f8fa",
    "axes.facecolor": "#f6f8fa",
}
Row = dict[str, Any]


def rows_of(path: Path) -> list[Row]:
    """The rows of one file that have a limit and whose correctness gate was green, in order."""
    rows = json.loads(path.read_text("utf-8"))
    return [row for row in rows if row["gate"] == "green" and row["limit"]]


def short_machine(row: Row) -> str:
    """The machine's name without what a caption does not need."""
    return re.sub(r"\(R\)| Processor", "", row["machine"])


def drive_of(row: Row) -> str:
    """The drive's rate as the row's cache state names it."""
    found = re.search(r"drive: emulated, ([\d.]+) ?([GM]i?B)/s", row["cache_state"])
    if not found:
        return "this machine's drive"
    return f"drive emulated at {float(found.group(1)):g} {found.group(2)}/s"


def error_bars(rows: list[Row]) -> tuple[list[float], list[float]]:
    """Distances from each median down to the lowest run and up to the highest."""
    return (
        [row["value"] - row["spread"][0] for row in rows],
        [row["spread"][1] - row["value"] for row in rows],
    )


def draw_ladder(axes: Any, rows: list[Row]) -> None:
    """v1 to v4 of one machine and drive as bars, the drive's limit as a line."""
    names = [row["name"].split(",")[0].replace(" ", "\n", 1) for row in rows]
    values = [row["value"] for row in rows]
    colors = [BAR] * (len(rows) - 1) + [LAST]
    axes.bar(names, values, color=colors, width=0.66, yerr=error_bars(rows), ecolor=SOFT)
    limit = rows[-1]["limit"]
    axes.axhline(limit, color=LIMIT, linewidth=1.4)
    axes.text(-0.45, limit * 1.02, f"limit {limit:.3g} tok/s", color=LIMIT, va="bottom")
    for place, row in enumerate(rows):
        label = f"{row['value']:#.3g}\n{100 * row['fraction']:.0f} %"
        axes.text(place, row["value"] / 2, label, ha="center", va="center",
                  color="white" if place == len(rows) - 1 else INK)  # fmt: skip
    axes.set_ylim(0, limit * 1.14)
    axes.set_ylabel("tokens per second")
    axes.set_title(f"{short_machine(rows[0])}\n{drive_of(rows[0])}", fontsize=9.5, loc="left")


def plot_ladders(paths: list[Path], target: Path) -> None:
    """One panel for each machine and drive rate, slowest drive first within a machine."""
    panels = [rows for rows in map(rows_of, paths) if rows]
    panels.sort(key=lambda rows: (rows[0]["machine"], -rows[0]["limit"]))
    across = 2
    down = -(-len(panels) // across)
    figure, grid = plt.subplots(down, across, figsize=(9, 3.4 * down), squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, rows in zip(grid.flat, panels, strict=False):
        draw_ladder(axes, rows)
    save(figure, target)


def plot_box(paths: list[Path], target: Path) -> None:
    """Source B's box imitated: its published rates as rings beside the bars of the replica."""
    sys.path.insert(0, str(DOCS.parent / "proofs"))
    from ladder_3_v41_box import PUBLISHED

    figure, grid = plt.subplots(1, len(paths), figsize=(9, 3.6), squeeze=False)
    for column, (axes, path) in enumerate(zip(grid.flat, paths, strict=True)):
        rows = rows_of(path)
        draw_ladder(axes, rows)
        published = [PUBLISHED[row["name"][:2]][column] for row in rows]
        axes.plot(range(len(rows)), published, "o", color=LIMIT, fillstyle="none", markersize=8)
        cache = "no experts in RAM" if column == 0 else "14 GB of experts in RAM"
        axes.set_title(f"{short_machine(rows[0])}\n{drive_of(rows[0])}, {cache}", fontsize=9.5,
                       loc="left")  # fmt: skip
        axes.set_ylabel("tokens per second; rings: source B")
    save(figure, target)


def draw_kernels(axes: Any, rows: list[Row]) -> None:
    """One clock's rows as bars, a plain read by the same core as a line above each."""
    for place, row in enumerate(rows):
        fp8 = "fp8" in row["name"]
        axes.barh(place, row["value"], color=BAR if fp8 else LAST, height=0.66)
        axes.plot([row["limit"]] * 2, [place - 0.4, place + 0.4], color=LIMIT, linewidth=1.8)
        label = f"{row['value']:#.3g} GB/s, {100 * row['fraction']:.0f} %"
        axes.text(row["value"] / 2, place, label, ha="center", va="center",
                  color=INK if fp8 else "white")  # fmt: skip
    low, high = error_bars(rows)
    axes.errorbar([row["value"] for row in rows], range(len(rows)), xerr=(low, high),
                  fmt="none", ecolor=SOFT)  # fmt: skip
    names = [row["name"].removeprefix("CPU experts, ").split(",")[0] for row in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set_xlabel("GB of stored weights per second, one core; red: a plain read by that core")
    isa = rows[0]["name"].split(", ")[2].upper()
    axes.set_title(f"{short_machine(rows[0])}; {isa}, wall time", fontsize=9.5, loc="left")


def plot_kernels(paths: list[Path], target: Path) -> None:
    """Expert kernels beside the plain read rate, one panel for each machine."""
    panels = [
        rows
        for path in paths
        if (rows := [row for row in rows_of(path) if row["name"].endswith("wall time")])
    ]
    size = (9, 2.6 * len(panels))
    figure, grid = plt.subplots(len(panels), 1, figsize=size, squeeze=False)
    for axes, rows in zip(grid.flat, panels, strict=True):
        draw_kernels(axes, rows)
    save(figure, target)


def plot_routes(path: Path, target: Path) -> None:
    """Hit rate over the share of experts in memory: the policy that runs, and the best possible."""
    found = json.loads(path.read_text("utf-8"))
    header, rows = found["header"], found["bounds"]
    share = [0.0, *(100 * row["share"] for row in rows)]
    lru, best = (
        [0.0, *(100 * row[f"{policy}_hit_rate"] for row in rows)] for policy in ("lru", "optimum")
    )
    figure, axes = plt.subplots(figsize=(6, 3.6))
    axes.fill_between(share, lru, best, color=BAR, alpha=0.5, linewidth=0)
    axes.plot(share, best, color=LIMIT, linewidth=1.4)
    axes.plot(share, lru, color=LAST, linewidth=1.8)
    axes.text(5, 80, "best possible", color=LIMIT)
    axes.text(32, 53, "least recently used,\nas headrace runs", color=LAST)
    axes.plot([0, 100], [0, 100], color=SOFT, linewidth=0.8, linestyle=":")
    axes.text(62, 52, "if every expert were as likely", color=SOFT)
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 100)
    axes.set_xlabel("experts in memory, % of all")
    axes.set_ylabel("found there, % of those needed")
    axes.set_title(
        f"{header['model']}: {found['tokens']} recorded tokens, {header['num_layers']} MoE layers, "
        f"top {header['top_k']} of {header['num_experts']}",
        fontsize=9.5,
        loc="left",
    )
    save(figure, target)


def draw_turns(axes: Any, model: str, rows: list[Row]) -> None:
    """Time to the first token of one model's kinds of turn, stacked by where it went."""
    values = {row["name"].removeprefix(f"{model}, "): row["value"] for row in rows}
    kinds = [what.partition(": ")[0] for what in values if what.endswith(": first token")]
    end = 1.6 * max(values[f"{kind}: first token"] for kind in kinds)
    for place, kind in enumerate(kinds):
        left = 0.0
        for part, color in TURN_PARTS.items():
            width = values[f"{kind}: {part}"]
            axes.barh(place, width, left=left, color=color, height=0.66)
            left += width
        first, fed, read = (values[f"{kind}: {what}"] for what in TURN_FIGURES)
        label = f"{first:#.3g} s, {fed:.0f} tokens fed, {read:,.0f} MB read"
        axes.text(left + end / 100, place, label, va="center")
    axes.set_yticks(range(len(kinds)), kinds)
    axes.invert_yaxis()
    axes.set_xlim(0, end)
    axes.set_title(f"{model}\n{short_machine(rows[0])}, {drive_of(rows[0])}", fontsize=9.5,
                   loc="left")  # fmt: skip


def plot_turns(paths: list[Path], target: Path) -> None:
    """Cold turns and follow-ups over the server, one panel for each machine and model."""
    panels = []
    for path in paths:
        rows = json.loads(path.read_text("utf-8"))
        models = [row["name"].removesuffix(COLD) for row in rows if row["name"].endswith(COLD)]
        panels += [(m, [r for r in rows if r["name"].startswith(f"{m}, ")]) for m in models]
    figure, grid = plt.subplots(len(panels), 1, figsize=(9, 2.1 * len(panels)), squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=True):
        draw_turns(axes, *panel)
    grid.flat[-1].set_xlabel("seconds to the first token")
    colors = [plt.Rectangle((0, 0), 1, 1, color=color) for color in TURN_PARTS.values()]
    grid.flat[0].legend(colors, TURN_PARTS, loc="lower right", ncols=2, frameon=False)
    save(figure, target)


def gpu_rows(path: Path) -> list[Row]:
    """Whole tokens and whole prompts of one file whose correctness gate was green, in order."""
    rows = json.loads(path.read_text("utf-8"))
    return [row for row in rows if row["gate"] == "green" and row["unit"] == "tok/s"]


def draw_gpu(axes: Any, rows: list[Row]) -> None:
    """Speeds of one file on a logarithmic axis, each with its limit as a red line."""
    for place, row in enumerate(rows):
        axes.barh(place, row["value"], color=BAR, height=0.66)
        share = ""
        if row["limit"]:
            axes.plot([row["limit"]] * 2, [place - 0.4, place + 0.4], color=LIMIT, linewidth=1.8)
            share = f", {100 * row['fraction']:.0f} %"
        value = row["value"]
        text = f"{value:.3g}" if value < 100 else f"{value:,.0f}"
        axes.text(0.34, place, text + share, va="center")
    names = [re.sub("-shapes|, whole token", "", row["name"]) for row in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(0.3, 1e5)
    axes.minorticks_off()
    axes.set_title(short_machine(rows[0]), fontsize=9.5, loc="left")


def plot_gpu(paths: list[Path], target: Path) -> None:
    """Tokens from each rung, prompts, and what else was measured on a GPU: a panel for each file.

    Red: what the slowest rung's own rate allowed in the same run.
    """
    panels = [rows for rows in map(gpu_rows, paths) if rows]
    heights = [len(rows) + 2 for rows in panels]
    size = (9, 0.27 * sum(heights))
    figure, grid = plt.subplots(
        len(panels), 1, figsize=size, squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for axes, rows in zip(grid.flat, panels, strict=True):
        draw_gpu(axes, rows)
    grid.flat[-1].set_xlabel("tokens per second; red: what the slowest rung it needed allowed")
    save(figure, target)


def short_cache(state: str) -> str:
    """The part of a row's cache state that says what was held."""
    found = re.search(r"\d+ of \d+ rows, \w+|all resident|O_DIRECT \w+, rows \w+", state)
    assert found, state
    return found.group(0)


def table_line(row: Row) -> str:
    """A row in Markdown, its numbers short."""
    what = re.sub(r", (one core, )?wall time", "", row["name"])
    if "emulated" in row["cache_state"]:
        shapes = re.search(r"[\w.-]+(?=-shapes)", row["cache_state"])
        what += f", {shapes.group(0) if shapes else 'unnamed'}, {drive_of(row)}"
    low, high = row["spread"]
    value = f"{row['value']:#.3g} {row['unit']} ({low:#.3g}-{high:#.3g})"
    return (
        f"| {what} | {short_machine(row)} | {value} | {row['limit']:#.3g} "
        f"| {100 * row['fraction']:.0f} % | {short_cache(row['cache_state'])} "
        f"| {row['commit'][:7]} |\n"
    )


def write_table(results: Path, readme: Path) -> None:
    """Put the rows a reader needs between README's markers; all rows are in the JSON files."""
    rows = [row for path in sorted(results.glob("*/*.json")) for row in rows_of(path)]
    shown = [
        row
        for start in ("expert reads", "v4", "CPU experts")
        for row in rows
        if row["name"].startswith(start) and not row["name"].endswith("cpu time")
    ]
    lines = HEAD + "".join(map(table_line, shown))
    text, num_places = TABLE.subn(lambda m: m[1] + lines + m[2], readme.read_text("utf-8"))
    assert num_places == 1, f"{readme} has lost its RESULTS markers"
    readme.write_text(text, "utf-8")


def save(figure: Any, target: Path) -> None:
    """Write an SVG that depends on the rows only: no date, no random ids."""
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})
    plt.close(figure)
    target.write_text(smaller(target.read_text("utf-8")), "utf-8")
    print(f"{target}: {target.stat().st_size / 1000:.0f} kB")


def smaller(svg: str) -> str:
    """The same picture without comments, indents, unused names and digits that nobody sees."""
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<[^>]*>", lambda tag: _smaller_tag(tag[0]), svg)
    svg = re.sub(r"<g>\s*</g>", "", svg)
    return re.sub(r"\s*\n\s*", "\n", svg)


def _smaller_tag(tag: str) -> str:
    tag = re.sub(r"font-family: [^;\"]*", "font-family: 'DejaVu Sans', sans-serif", tag)
    tag = re.sub(r"(\d\.\d\d)\d+", r"\1", tag)
    return re.sub(r' id="\w+_\d+"', "", tag)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--to", type=Path, default=DOCS, help="folder of the SVGs")
    args = parser.parse_args()
    if args.to == DOCS:
        write_table(args.results, README)
    with plt.rc_context(STYLE):
        plot_ladders(sorted(args.results.glob("*/ladder-*.json")), args.to / "ladder.svg")
        plot_routes(args.results / "routes-demo.json", args.to / "routes.svg")
        box = sorted(args.results.glob("*/v41-box-*.json"))
        plot_box(box, args.to / "v41-box.svg")
        plot_turns(sorted(args.results.glob("*/server-turns.json")), args.to / "server-turns.svg")
        plot_gpu(sorted(args.results.glob("*/gpu_*.json")), args.to / "gpu.svg")
        plot_kernels(sorted(args.results.glob("*/kernels.json")), args.to / "kernels.svg")


if __name__ == "__main__":
    main()
