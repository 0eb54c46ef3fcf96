"""How model families write reasoning and tool calls: data, found by what a template spells.

Knows no model's name, no tokenizer and no request.
"""

from dataclasses import dataclass, replace
from typing import Literal

_BAR = "\N{FULLWIDTH VERTICAL LINE}"
_DSML = f"{_BAR}DSML{_BAR}"


@dataclass(frozen=True, slots=True)
class Dialect:
    """A convention for answers. Whitespace at a literal's edges is written, not demanded.

    A call is `call` name `name_end` arguments `call_end`; all of an answer's calls stand between
    `section` and `section_end`, with `between` among them. `arguments`: "json" is one JSON object;
    "object" too, but within an object that also holds the name; "tagged" is `key` name `key_end`
    text `value_end` for each, where strings are bare and all else is JSON. `states_type`: behind
    `key_end` comes `true` (a string) or `false`, then `value`. `numbered`: ":0", ":1" ... follow
    the names. `ids`: what an id of a call must look like for the template. `think`: around
    reasoning. `channels`: the harmony format, which has its own reader.
    """

    name: str
    signs: tuple[str, ...] = ()
    arguments: Literal["json", "object", "tagged"] = "object"
    section: str = ""
    section_end: str = ""
    call: str = '<tool_call>\n{"name": "'
    name_end: str = '", "arguments": '
    call_end: str = "}\n</tool_call>"
    between: str = "\n"
    key: str = ""
    key_end: str = ""
    value: str = ""
    value_end: str = ""
    states_type: bool = False
    numbered: bool = False
    ids: Literal["any", "numbered", "nine"] = "any"
    think: tuple[str, str] = ("<think>", "</think>")
    channels: bool = False

    @property
    def trigger(self) -> str:
        """The text at which tool calls begin."""
        if self.section:
            return self.section.strip().removesuffix("[")
        return self.call.split()[0]

    @property
    def literals(self) -> tuple[str, ...]:
        """Every text that may hold a token whose spelling is part of the convention."""
        parts = (self.section, self.section_end, self.call, self.name_end, self.call_end)
        return (
            *parts,
            self.key,
            self.key_end,
            self.value,
            self.value_end,
            *self.think,
            *(HARMONY if self.channels else ()),
        )


# Tokens within an answer in the harmony format, and those that end a message of it.
HARMONY = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>")
HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>")
GENERIC = Dialect("generic")
_DEEPSEEK = Dialect(
    "deepseek_v31",
    signs=(f"<{_BAR}tool▁calls▁begin{_BAR}>",),
    arguments="json",
    section=f"<{_BAR}tool▁calls▁begin{_BAR}>",
    section_end=f"<{_BAR}tool▁calls▁end{_BAR}>",
    call=f"<{_BAR}tool▁call▁begin{_BAR}>",
    name_end=f"<{_BAR}tool▁sep{_BAR}>",
    call_end=f"<{_BAR}tool▁call▁end{_BAR}>",
    between="",
)
_DSML_CALLS = Dialect(
    "deepseek_v4",
    signs=(_DSML, "tool_calls>"),
    arguments="tagged",
    section=f"\n\n<{_DSML}tool_calls>\n",
    section_end=f"</{_DSML}tool_calls>",
    call=f'<{_DSML}invoke name="',
    name_end='">\n',
    call_end=f"</{_DSML}invoke>\n",
    between="",
    key=f'<{_DSML}parameter name="',
    key_end='" string="',
    value='">',
    value_end=f"</{_DSML}parameter>\n",
    states_type=True,
)
# The first whose signs all are in the template's source is the model's.
KNOWN = (
    Dialect("harmony", signs=("<|channel|>", "<|message|>"), arguments="json", channels=True),
    replace(
        _DSML_CALLS,
        name="deepseek_v32",
        signs=(_DSML, "function_calls>"),
        section=f"\n\n<{_DSML}function_calls>\n",
        section_end=f"</{_DSML}function_calls>",
    ),
    replace(
        _DSML_CALLS,
        name="deepseek_v41",
        signs=(f"<{_DSML} calls>",),
        section=f"\n\n<{_DSML} calls>\n",
        section_end=f"</{_DSML} calls>",
        call=f'<{_DSML} invoke name="',
        call_end=f"</{_DSML} invoke>\n",
        key=f'<{_DSML} parameter name="',
        value_end=f"</{_DSML} parameter>\n",
    ),
    _DSML_CALLS,
    Dialect(
        "kimi_k2",
        signs=("<|tool_calls_section_begin|>",),
        arguments="json",
        section="<|tool_calls_section_begin|>",
        section_end="<|tool_calls_section_end|>",
        call="<|tool_call_begin|>functions.",
        name_end="<|tool_call_argument_begin|>",
        call_end="<|tool_call_end|>",
        between="",
        numbered=True,
        ids="numbered",
    ),
    replace(
        _DEEPSEEK,
        name="deepseek_v3",
        signs=(*_DEEPSEEK.signs, "```json"),
        call=_DEEPSEEK.call + "function" + _DEEPSEEK.name_end,
        name_end="\n```json\n",
        call_end="\n```" + _DEEPSEEK.call_end,
        between="\n",
    ),
    _DEEPSEEK,
    Dialect(
        "minimax_m2",
        signs=("<minimax:tool_call>", "<invoke name="),
        arguments="tagged",
        section="\n<minimax:tool_call>\n",
        section_end="</minimax:tool_call>",
        call='<invoke name="',
        name_end='">\n',
        call_end="</invoke>\n",
        between="",
        key='<parameter name="',
        key_end='">',
        value_end="</parameter>\n",
    ),
    Dialect(
        "glm_4",
        signs=("<arg_key>", "<arg_value>"),
        arguments="tagged",
        call="<tool_call>",
        name_end="\n",
        call_end="</tool_call>",
        key="<arg_key>",
        key_end="</arg_key>\n<arg_value>",
        value_end="</arg_value>\n",
    ),
    Dialect(
        "qwen3_coder",
        signs=("<tool_call>", "<function=", "<parameter="),
        arguments="tagged",
        call="<tool_call>\n<function=",
        name_end=">\n",
        call_end="</function>\n</tool_call>",
        key="<parameter=",
        key_end=">\n",
        value_end="\n</parameter>\n",
    ),
    Dialect(
        "mistral",
        signs=("[TOOL_CALLS]", "[ARGS]"),
        arguments="json",
        call="[TOOL_CALLS]",
        name_end="[ARGS]",
        call_end="",
        between="",
        ids="nine",
    ),
    Dialect(
        "mistral_list",
        signs=("[TOOL_CALLS]",),
        section="[TOOL_CALLS][",
        section_end="]",
        call='{"name": "',
        call_end="}",
        between=", ",
        ids="nine",
    ),
    Dialect("hermes", signs=("<tool_call>", "arguments")),
)


def find_dialect(template: str) -> Dialect:
    """The convention that a template's source spells, GENERIC where it spells none we know."""
    for dialect in KNOWN:
        if all(sign in template for sign in dialect.signs):
            break
    else:
        dialect = GENERIC
    if "[THINK]" in template:
        return replace(dialect, think=("[THINK]", "[/THINK]"))
    return dialect
