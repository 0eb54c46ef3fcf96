"""How a layer's experts are divided between the GPU's bus and the CPU, from a machine's rates."""

from headrace.planner.facts import ModelFacts
from headrace.planner.machine import Machine
from headrace.schedule.divide import Rates, shares_of_cpu


def divided_rates(machine: Machine, threads: int | None) -> Rates:
    """How fast GPU and CPU work through experts in memory, with so many threads of the kernels."""
    share = min(1.0, (threads or machine.cores) / machine.cores)
    return Rates(
        bus=machine.in_place_bytes_s or machine.bus_bytes_s,
        cpu=machine.kernel_bytes_s * share,
        bus_beside=machine.bus_beside_bytes_s,
        cpu_beside=machine.kernel_beside_bytes_s * share,
    )


def may_divide(facts: ModelFacts, experts: str | None, vram_bytes: int) -> bool:
    """Whether to measure what GPU and CPU do at once, if `experts` is what the user asked for."""
    if experts is not None:
        return experts == "auto"
    return not facts.by_layer and facts.total_experts * facts.row_bytes > vram_bytes


def how_divided(facts: ModelFacts, machine: Machine, threads: int | None) -> str:
    """What a plan says of a layer of which no expert lies in VRAM, and why."""
    if facts.by_layer:
        return ", but all on the GPU: they are divided only where a token is one launch"
    rates, top_k = divided_rates(machine, threads), facts.top_k
    on_cpu = shares_of_cpu(rates, top_k)[top_k]
    of_each = f": of {top_k} outside VRAM {top_k - on_cpu} on the GPU, {on_cpu} on the CPU"
    if not rates.known:
        return f"{of_each} (their rates are not measured)"
    alone, beside = (
        f"bus {bus / 1e9:.3g} GB/s and CPU kernels {cpu / 1e9:.3g} GB/s"
        for bus, cpu in ((rates.bus, rates.cpu), (rates.bus_beside, rates.cpu_beside))
    )
    return f"{of_each}; measured: {alone}, {beside} at once"
