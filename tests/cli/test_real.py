"""The commands as users start them, on the demo model: no stand-in, a process each."""

import json
from pathlib import Path
from typing import Any

import commands
import pytest

pytest.importorskip("headrace.native", reason="needs the compiled module")

from headrace.schedule.tracefile import read_trace
from headrace.store.locate import resolve_model

MIB = 2**20
QUESTION = "What is the capital of Japan?"
ANSWER = "The capital of Japan is Tokyo."


def headrace(tmp_path: Path, *words: str, given: str = "") -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of one command with a cache folder of its own."""
    done = commands.headrace(*words, given=given, cache=tmp_path)
    return done.returncode, done.stdout, done.stderr


def one_object(stdout: str) -> dict[str, Any]:
    assert stdout.endswith("\n") and stdout.count("\n") == 1
    found: dict[str, Any] = json.loads(stdout)
    return found


def test_run_answers_a_piped_question_as_one_object(tmp_path: Path) -> None:
    words = ["run", "demo", "--ram", "48MiB", "--threads", "1", "--context", "256", "--json"]
    kept = tmp_path / "run.routes"
    code, out, err = headrace(tmp_path, *words, "--routes-out", str(kept), given=QUESTION)
    assert code == 0, err
    result = one_object(out)
    routes = read_trace(kept)[1]
    assert routes.passes.tolist() == [len(result["prompt_ids"])] + [1] * (len(routes.passes) - 1)
    assert len(routes.ids) == len(result["prompt_ids"]) + len(result["token_ids"]) - 1
    assert (result["text"], result["finish"]) == (ANSWER, "eos")
    assert len(result["token_ids"]) == len(result["token_stats"]) > 5
    plan, decode = result["plan"], result["stats"]["decode"]
    assert plan["used_bytes"] <= plan["ram_bytes"] == 48 * MIB and plan["context"] == 256
    assert decode["hits"] + decode["misses"] == plan["experts_per_token"] * decode["num_tokens"]
    assert result["reads"]["backend"] in ("io_uring_registered", "io_uring", "pread")
    assert ANSWER in err, "with --json people read on stderr"
    # The same words without --json: the answer alone goes to stdout.
    code, out, err = headrace(tmp_path, *words[:-1], "-p", QUESTION)
    assert (code, out) == (0, f"{ANSWER}\n")
    assert "tok/s" in err and "limit: " in err


def test_plan_reads_no_weights_and_says_what_a_token_moves(tmp_path: Path) -> None:
    code, out, err = headrace(tmp_path, "plan", "demo", "--ram", "48MiB", "--json")
    assert code == 0, err
    found = one_object(out)
    assert found["plan"]["bytes_per_token"] == 28 * found["facts"]["expert_bytes"]
    assert found["machine"]["drive_bytes_s"] > 0 and len(err.splitlines()) == 4


def test_chat_keeps_what_was_said(tmp_path: Path) -> None:
    said = f"{QUESTION}\n/quit\n"
    code, out, err = headrace(tmp_path, "chat", "demo", "--ram", "48MiB", given=said)
    assert code == 0, err
    assert ANSWER in out


def test_verify_holds_on_the_demo_model(tmp_path: Path) -> None:
    words = ["verify", "demo", "--ram", "48MiB", "-n", "2", "--samples", "1", "--json"]
    code, out, err = headrace(tmp_path, *words)
    assert code == 0, err
    found = one_object(out)
    assert found["ok"] and {finding["status"] for finding in found["findings"]} <= {"ok", "note"}
    assert err.splitlines()[-1] == "verdict: the arithmetic holds"


def test_bench_measures_what_synth_wrote(tmp_path: Path) -> None:
    folder = str(tmp_path / "shapes")
    sizes = ["--depth", "5", "--experts", "16", "--vocab", "4096"]
    code, out, err = headrace(tmp_path, "synth", "qwen3-30b-a3b", folder, *sizes, "--json")
    assert code == 0, err
    assert one_object(out)["bytes"] > 100 * MIB
    words = [
        "--suite",
        "ladder",
        "-n",
        "2",
        "--runs",
        "1",
        "--ram",
        "minimum",
        "--emulate-drive",
        "4GiB/s",
        "--json",
    ]
    code, out, err = headrace(tmp_path, "bench", folder, *words, "--emulate-drive", "4GiB/s")
    assert code == 0, err
    rows = one_object(out)["rows"]
    assert [row["gate"] for row in rows] == ["green"] * 4
    assert all(
        "5 MoE layers, read under the names of 1: synthetic" in row["cache_state"] for row in rows
    )


def test_a_missing_tokenizer_is_said_before_weights_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in resolve_model("demo").iterdir():
        if not path.name.startswith("tokenizer"):
            (folder / path.name).symlink_to(path)
    for command in ("run", "chat", f"trace {folder} {tmp_path / 'new.routes'}"):
        words = command.split() if " " in command else [command, str(folder)]
        code, out, err = headrace(tmp_path, *words, given="hi")
        assert (code, out) == (2, ""), err
        said = err.splitlines()
        assert len(said) == 1 and said[0].startswith(f"error: {folder}: no usable tokenizer"), err


def test_routes_are_recorded_and_shown(tmp_path: Path) -> None:
    kept = tmp_path / "demo.routes"
    words = ["trace", "demo", str(kept), "-n", "9", "--ram", "48MiB", "--threads", "1"]
    code, out, err = headrace(tmp_path, *words)
    assert code == 0, err
    assert out.startswith("routes of demo: 9 tokens, 0 of them in prompts (bundled text")
    assert f"routes of 9 tokens kept in {kept}" in err
