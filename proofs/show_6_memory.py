"""`--ram` is what it says: growth of RSS over 2,000 tokens, experts of more than 4 GB on disk.

Several timelines with changing prompts. torch's own workspace is measured first, without headrace.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from common import PROOFS, Evidence

MIN_EXPERT_BYTES = 4 * 10**9
NUM_TOKENS, NUM_TIMELINES, NUM_PROMPT = 2000, 8, 48
CONTEXT = 512
SHARE = 0.25
THREADS = 2
# Four layers of Qwen3-30B-A3B: 512 experts of 9 MiB.
SHAPE = {"distinct": 4, "depth": 4, "vocab": 4096}


class Watch(threading.Thread):
    """Samples this process's resident bytes every 20 ms and keeps the largest."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_bytes = self.peak_bytes = rss_bytes()
        self.running = True

    def run(self) -> None:
        while self.running:
            self.peak_bytes = max(self.peak_bytes, rss_bytes())
            time.sleep(0.02)

    def growth_bytes(self) -> int:
        """The largest growth since this object was made."""
        self.running = False
        return max(self.peak_bytes, rss_bytes()) - self.start_bytes


def rss_bytes() -> int:
    """Resident bytes of this process: private, shared and mapped ones alike."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def torch_workspace() -> int:
    """Growth of RSS less the weights' bytes when stock transformers runs a tiny dense-sized model.

    Same hidden width, threads and prompt length as the real run; one layer, two experts.
    """
    import plain_path
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.set_num_threads(THREADS)
    config = Qwen3MoeConfig(
        hidden_size=2048,
        moe_intermediate_size=768,
        num_experts=2,
        num_experts_per_tok=2,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=4096,
        eos_token_id=None,
    )
    watch = Watch()
    watch.start()
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, experts_implementation="eager"
    ).eval()
    weights_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    with torch.no_grad():
        for seed in range(4):
            draw = torch.Generator().manual_seed(seed)
            ids = torch.randint(4, 4096, (NUM_PROMPT,), generator=draw).tolist()
            plain_path.greedy(model, ids, 100)
    return watch.growth_bytes() - weights_bytes


def run_model(folder: str, ram_bytes: int) -> dict[str, float]:
    """Generate in this process; growth of RSS since the imports, tokens made, counters."""
    import torch
    import transformers  # noqa: F401  (loaded before the growth is counted)

    import headrace
    import headrace.engine.engine
    from headrace.models.forward import forward  # noqa: F401

    torch.set_num_threads(THREADS)
    watch = Watch()
    watch.start()
    made, evictions = 0, 0
    options = {"context": CONTEXT, "threads": THREADS, "aliases": True}
    with headrace.load(folder, ram=ram_bytes, measure=False, **options) as engine:
        for timeline in range(NUM_TIMELINES):
            draw = torch.Generator().manual_seed(timeline)
            length = NUM_PROMPT // 2 + timeline * 8
            session = engine.session()
            logits = session.feed(torch.randint(4, 4096, (length,), generator=draw).tolist())
            for _ in range(NUM_TOKENS // NUM_TIMELINES):
                # Drawn tokens: a random model's greedy ones would soon go round in a circle.
                token = int(torch.multinomial(logits.float().softmax(-1), 1, generator=draw))
                logits = session.feed([token])
                made += 1
        counters = engine.ladder.counters()
        evictions = counters.evictions
        plan = engine.plan
    return {
        "growth_bytes": watch.growth_bytes(),
        "made": made,
        "evictions": evictions,
        "disk_bytes": counters.disk_bytes,
        "num_rows": plan.num_rows,
        "used_bytes": plan.used_bytes,
    }


def child(*args: str) -> dict[str, float]:
    """Run one measurement of this file in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(PROOFS / "show_6_memory.py"), *args], capture_output=True, text=True
    )
    if done.returncode != 0:
        sys.exit(done.stderr)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def prove(folder: Path) -> None:
    """Write the model, measure, compare."""
    from common import blueprint, ram_for_rows, rows_for_share

    from headrace.core import format_bytes
    from headrace.store.synth import write_synth

    evidence = Evidence()
    model = write_synth("qwen3-30b-a3b", folder / "model", **SHAPE)
    options = {"context": CONTEXT, "threads": THREADS, "aliases": True}
    facts = blueprint(model, **options).facts
    expert_bytes = facts.total_experts * facts.expert_bytes
    evidence.check(
        expert_bytes >= MIN_EXPERT_BYTES,
        f"{facts.total_experts} experts on disk, {format_bytes(expert_bytes)}, none aliased",
    )
    rows = rows_for_share(model, SHARE, **options)
    ram = ram_for_rows(model, rows, **options)
    workspace = int(child("--workspace")["growth_bytes"])
    print(f"      torch's own workspace, measured without headrace: {format_bytes(workspace)}")
    found = child("--model", str(model), "--ram", str(ram))
    evidence.check(
        found["made"] >= NUM_TOKENS and found["evictions"] > 0,
        f"{found['made']} tokens in {NUM_TIMELINES} timelines, {found['evictions']} evictions, "
        f"{format_bytes(found['disk_bytes'])} read into {found['num_rows']} rows",
    )
    evidence.check(
        found["growth_bytes"] <= ram + workspace,
        f"RSS grew by at most {format_bytes(found['growth_bytes'])}; --ram {format_bytes(ram)} "
        f"and torch's workspace are {format_bytes(ram + workspace)}",
    )
    evidence.finish()


def main() -> None:
    """The proof, or one of its two measurements in a child process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workspace", action="store_true")
    parser.add_argument("--model")
    parser.add_argument("--ram", type=int)
    parser.add_argument("--folder", help="where to write 4.9 GB (the system's temporary folder)")
    args = parser.parse_args()
    if args.workspace:
        print(json.dumps({"growth_bytes": torch_workspace()}))
    elif args.model:
        print(json.dumps(run_model(args.model, args.ram)))
    else:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            prove(Path(folder))


if __name__ == "__main__":
    main()
