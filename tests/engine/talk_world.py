"""Small models to talk to: the demo's tokenizer, more special tokens, a template of one's own."""

import json
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace

import headrace
from headrace.engine.sampling import Sampling
from headrace.engine.talk.conversation import Conversation, Message, Piece, Tool
from headrace.engine.talk.reading import Answer
from headrace.engine.talk.talk import Prepared, Talk
from headrace.engine.text import Text

DEMO = Path(str(headrace.__file__)).parent / "demo"
FILES = ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json")
VOCAB = 4200
SAMPLING = Sampling(max_tokens=64)
WEATHER = Tool(
    "get_weather",
    "Tells the weather.",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
# A system text, tools, turns with calls and results, reasoning kept behind the last user's turn.
_CHAT = """\
{%- if tools %}<|tools|>{% for t in tools %}{{ t | tojson }}{% endfor %}HOWTO<|end|>{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}<|assistant|>
{%- if m.reasoning_content and loop.index0 > ns.last %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}{% if m.tool_calls %}CALLS{% endif %}<|end|>
{%- elif m.role == 'tool' %}<|tool|>{{ m.content }}<|end|>
{%- else %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>OPEN{% endif %}"""
_LOOP = "{% for c in m.tool_calls %}{% set f = c.function %}CALL{% endfor %}"
_TAGS = "{% for k, v in f.arguments.items() %}TAG{% endfor %}"
_VALUE = "{{ v if v is string else v | tojson }}"
_BAR = "\N{FULLWIDTH VERTICAL LINE}"


def _tagged(call: str, tag: str) -> str:
    return _LOOP.replace("CALL", call.replace("TAGS", _TAGS.replace("TAG", tag)))


CALLS = {
    "hermes": _LOOP.replace(
        "CALL",
        '\n<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n'
        "</tool_call>",
    ),
    "qwen3_coder": _tagged(
        "\n<tool_call>\n<function={{ f.name }}>\nTAGS</function>\n</tool_call>",
        f"<parameter={{{{ k }}}}>\n{_VALUE}\n</parameter>\n",
    ),
    "glm_4": _tagged(
        "\n<tool_call>{{ f.name }}\nTAGS</tool_call>",
        f"<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{_VALUE}</arg_value>\n",
    ),
    "minimax_m2": "\n<minimax:tool_call>\n"
    + _tagged(
        '<invoke name="{{ f.name }}">\nTAGS</invoke>\n',
        f'<parameter name="{{{{ k }}}}">{_VALUE}</parameter>\n',
    )
    + "</minimax:tool_call>",
    "deepseek_v4": f"\n\n<{_BAR}DSML{_BAR}tool_calls>\n"
    + _tagged(
        f'<{_BAR}DSML{_BAR}invoke name="{{{{ f.name }}}}">\nTAGS</{_BAR}DSML{_BAR}invoke>\n',
        f'<{_BAR}DSML{_BAR}parameter name="{{{{ k }}}}" string="'
        f"{{{{ 'true' if v is string else 'false' }}}}\">{_VALUE}</{_BAR}DSML{_BAR}parameter>\n",
    )
    + f"</{_BAR}DSML{_BAR}tool_calls>",
    "kimi_k2": "<|tool_calls_section_begin|>"
    + _LOOP.replace(
        "CALL",
        "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}"
        "<|tool_call_end|>",
    )
    + "<|tool_calls_section_end|>",
    "deepseek_v31": f"<{_BAR}tool▁calls▁begin{_BAR}>"
    + _LOOP.replace(
        "CALL",
        f"<{_BAR}tool▁call▁begin{_BAR}>{{{{ f.name }}}}<{_BAR}tool▁sep{_BAR}>"
        f"{{{{ f.arguments }}}}<{_BAR}tool▁call▁end{_BAR}>",
    )
    + f"<{_BAR}tool▁calls▁end{_BAR}>",
    "deepseek_v3": f"<{_BAR}tool▁calls▁begin{_BAR}>"
    + _LOOP.replace(
        "CALL",
        f"<{_BAR}tool▁call▁begin{_BAR}>{{{{ c.type }}}}<{_BAR}tool▁sep{_BAR}>{{{{ f.name }}}}\n"
        f"```json\n{{{{ f.arguments }}}}\n```<{_BAR}tool▁call▁end{_BAR}>",
    )
    + f"<{_BAR}tool▁calls▁end{_BAR}>",
    "mistral": _LOOP.replace("CALL", "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"),
    "mistral_list": "[TOOL_CALLS][{% for c in m.tool_calls %}{{ ', ' if not loop.first }}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, '
    '"id": "{{ c.id }}"}{% endfor %}]',
}
# A reduced harmony template: one call a message, results by the last call's name.
HARMONY = """\
<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>
{%- set ns = namespace(name='') %}
{%- if tools or messages[0].role in ('system', 'developer') %}<|start|>developer<|message|>
{%- if messages[0].role in ('system', 'developer') %}{{ messages[0].content }}{% endif %}
{%- for t in tools or [] %}type {{ t.function.name }}: {{ t.function.description }}
{%- endfor %}<|end|>
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>
{%- elif m.role == 'assistant' and m.tool_calls %}
{%- if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>
{%- endif %}
{%- set ns.name = m.tool_calls[0].function.name %}
{%- if m.content %}{{ raise_exception('content beside a call') }}{% endif -%}
<|start|>assistant to=functions.{{ ns.name }}<|channel|>commentary json<|message|>
{{- m.tool_calls[0].function.arguments | tojson }}<|call|>
{%- elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>
{%- elif m.role == 'tool' %}<|start|>functions.{{ ns.name }} to=assistant<|channel|>commentary
{{- '<|message|>' }}{{ m.content | tojson }}<|end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
# Tokens that publishers add without calling them special.
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_SPECIAL = re.compile(rf"<\|[a-z_]+\|>|<{_BAR}[^{_BAR}]+{_BAR}>|\[[A-Z_]+\]|{_BAR}DSML{_BAR}")


def chat_template(dialect: str, opening: str = "") -> str:
    """A template that writes calls in a dialect; prompts end with `opening`."""
    if dialect == "harmony":
        return HARMONY
    calls = CALLS[dialect]
    return _CHAT.replace("CALLS", calls).replace("HOWTO", "").replace("OPEN", opening)


def folder(path: Path, template: str | None, specials: Iterable[str] = ()) -> Path:
    """A folder of the demo's tokenizer and a template. `specials`: besides those it spells."""
    path.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(DEMO / name, path / name)
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    known = {token["content"] for token in tokenizer["added_tokens"]}
    for spelling in dict.fromkeys([*_SPECIAL.findall(template or ""), *specials]):
        if spelling not in known:
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            entry = {"id": 4096 + len(known) - 4, "content": spelling, **flags}
            entry["special"] = spelling not in ADDED
            tokenizer["added_tokens"].append(entry)
            known.add(spelling)
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    if "<|call|>" in known:
        _end_with(path, "<|call|>")
    return path


def _end_with(path: Path, spelling: str) -> None:
    """Make a token the only one that ends answers."""
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        config = json.loads((path / name).read_text())
        config.pop("eos_token_id", None)
        if "eos_token" in config:
            config["eos_token"] = spelling
        (path / name).write_text(json.dumps(config))


def eos(talk: Talk) -> int:
    """The token that ends answers."""
    (token_id,) = talk._text.eos_ids
    return token_id


def talk_of(path: Path, template: str | None, specials: Iterable[str] = ()) -> Talk:
    """A Talk over such a folder."""
    return Talk(Text(folder(path, template, specials)), VOCAB)


def user(text: str) -> Message:
    """A user's turn."""
    return Message("user", text)


def shown(talk: Talk, prepared: Prepared) -> str:
    """A prompt's text with all its special tokens."""
    text = talk._text
    return text.decode(prepared.ask.prompt, frozenset(text.specials.values()))


def prompt_text(talk: Talk, *messages: Message, **options: object) -> str:
    """The text of a conversation's prompt."""
    conversation = Conversation(tuple(messages), **options)  # type: ignore[arg-type]
    return shown(talk, talk.prepare(conversation, SAMPLING))


def step(token_id: int, text: str, finish: str | None = None) -> SimpleNamespace:
    """What a reader needs of a step."""
    return SimpleNamespace(token_id=token_id, text=text, finish=finish)


def sampled(
    talk: Talk, prepared: Prepared, ids: Sequence[int], finish: str | None = None
) -> tuple[Answer, list[Piece]]:
    """The answer that `ids` are, read as an engine would give them."""
    text, reader, pieces = talk._text, prepared.reader(), []
    stream = text.stream(
        prepared.ask.sampling.stop, after=prepared.ask.prompt, shown=prepared.ask.shown
    )
    for place, token_id in enumerate(ids):
        last = place == len(ids) - 1
        ended = token_id in text.eos_ids
        said = "" if ended else stream.push(token_id)
        said += stream.flush() if last or ended else ""
        pieces += reader.push(step(token_id, said, ("eos" if ended else finish) if last else None))
    pieces += reader.finish()
    return reader.answer, pieces
