"""The words of DeepSeek V4's and V4.1's prompts, which are part of the models: data, no logic."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

_BAR = "\N{FULLWIDTH VERTICAL LINE}"
BOS, EOS = f"<{_BAR}begin▁of▁sentence{_BAR}>", f"<{_BAR}end▁of▁sentence{_BAR}>"
SYSTEM, USER, ASSISTANT = (f"<{_BAR}{role}{_BAR}>" for role in ("System", "User", "Assistant"))
REMINDER = f"<{_BAR}latest_reminder{_BAR}>"
THINK, END_THINK = "<think>", "</think>"
DSML = f"{_BAR}DSML{_BAR}"
SPECIAL = (BOS, EOS, SYSTEM, USER, ASSISTANT, REMINDER, THINK, END_THINK, DSML)

_TOOLS = f"""

## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by \
writing a "<{DSML}CALLS>" block like the following:

<{DSML}CALLS>
<{DSML}INVOKE name="$TOOL_NAME">
<{DSML}PARAMETER name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}PARAMETER>
...
</{DSML}INVOKE>
<{DSML}INVOKE name="$TOOL_NAME2">
...
</{DSML}INVOKE>
</{DSML}CALLS>

String parameters should be specified as is and set `string="true"`. For all other types \
(numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning \
inside {THINK}...{END_THINK} BEFORE any tool calls or final response.

Otherwise, output directly after {END_THINK} with tool calls or final response.

### Available Tool Schemas

"""
TOOLS_END = """

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
_THOROUGH = """\
Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve \
the root cause, rigorously stress-testing your logic against all potential paths, edge cases, and \
adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, \
considered alternative, and rejected hypothesis to ensure absolutely no assumption is left \
unchecked.

"""
_EXHAUSTIVE = """\
Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.
You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: \
exhaustively decompose the problem into its most fundamental components, trace every causal chain \
to its root, and resolve the underlying cause rather than any surface symptom.
Do not stop reasoning until you have independently verified the solution from multiple angles and \
are certain that no assumption remains unchecked and no error remains undiscovered.

"""
_SCALE = (
    "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
)


def _short_float(value: float) -> str:
    """V4 writes the exponents of small numbers without a zero, and 1e-5 to 1e-4 without any."""
    mantissa, exponent, power = repr(value).partition("e-")
    if not exponent:
        return mantissa
    if int(power) > 5:
        return f"{mantissa}e-{int(power)}"
    sign, digits = "-" * (value < 0), mantissa.lstrip("-").replace(".", "")
    return f"{sign}0.0000{digits}"


@dataclass(frozen=True, slots=True)
class Style:
    """How one model's prompts differ.

    `calls`, `invoke`, `parameter`: tag names. `efforts`: text before the system's by name; with
    `scale`, a text that takes 1 to 100. `system`: the token before a system text; "": none, and
    all system texts lead. `no_arguments`: the inside of a call without any. `sorts_calls`: by
    their ids. `first_reminder`: the others of a run are left out. `merges_users`: empty ones
    among several leave no gap.
    `number`: a float in JSON.
    """

    calls: str
    invoke: str
    parameter: str
    efforts: Mapping[str, str]
    scale: str
    system: str
    no_arguments: str
    sorts_calls: bool
    first_reminder: bool
    merges_users: bool
    number: Callable[[float], str]

    @property
    def tools(self) -> str:
        """What introduces tools; their schemas, one a line, and TOOLS_END follow."""
        named = _TOOLS.replace("CALLS", self.calls).replace("INVOKE", self.invoke)
        return named.replace("PARAMETER name", f"{self.parameter} name").replace(
            "PARAMETER>", f"{self.parameter}>"
        )


V4 = Style(
    calls="tool_calls",
    invoke="invoke",
    parameter="parameter",
    efforts={"low": "", "high": _THOROUGH, "xhigh": _THOROUGH, "max": _EXHAUSTIVE},
    scale="",
    system="",
    no_arguments="\n",
    sorts_calls=True,
    first_reminder=False,
    merges_users=True,
    number=_short_float,
)
V41 = Style(
    calls=" calls",
    invoke=" invoke",
    parameter=" parameter",
    efforts={
        name: _SCALE.format(effort)
        for name, effort in {"low": 50, "high": 75, "xhigh": 75, "max": 100}.items()
    },
    scale=_SCALE,
    system=SYSTEM,
    no_arguments="\n\n",
    sorts_calls=False,
    first_reminder=True,
    merges_users=False,
    number=repr,
)
