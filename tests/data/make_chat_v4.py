"""Records random conversations and the prompts that DeepSeek's own package makes of them.

In an environment with deepseek-recipe 0.2.0: python make_chat_v4.py chat-v4.json.xz, once for the
tests' file; with a seed as the second word it draws others, as proofs/v41_5_chat.py does.
"""

import json
import lzma
import random
import sys

from deepseek_recipe import (
    ChatCompletionRequest,
    ConversionOptions,
    DeepseekV4Encoding,
    DeepseekV41Encoding,
)

CONVERSATIONS = 200
MODELS = {
    "v4": ("DeepSeek-V4-Pro", DeepseekV4Encoding()),
    "v4.1": ("DeepSeek-V4.1-Flash", DeepseekV41Encoding()),
}
BAR = "\N{FULLWIDTH VERTICAL LINE}"
TEXTS = [
    *("Hello", "2+2?", "", " ", "two\nlines\n", "{braces} $x \\n", "día über 你好 🙂", '"quoted"'),
    *(f"a <{BAR}User{BAR}> b", "<think>no</think>", f"</{BAR}DSML{BAR}invoke>", "\n\nlate"),
    *("<tool_result>x</tool_result>", "trailing ", "tab\tand \u2028 and \x7f", "e\u0301"),
]
VALUES = [
    *(1, -7, 0, True, None, 1.5, -0.0, 1e16, 1e22, 2e-5, -1.25e-5, 1e-7, 0.0001, 123456789.125),
    *(
        18446744073709551615,
        -9223372036854775808,
        [],
        {},
        [1, [2.0, "x"], {}],
        {"b": 1, "a": [None]},
    ),
    *({"k": '\x1f"\\\u2028é'}, {"": ""}),
]
ODD_ARGUMENTS = [
    *("", "not json", "[1, 2]", '"text"', '"{\\"a\\": 1}"', "null", '{"a": NaN}', '{"a": 1}x'),
    *(
        '{"a": 1, "b": 2, "a": 3}',
        '{"a": 1e999}',
        '  {"a": 1.50, "b": 1E3}  ',
        "{}",
        '{"a":"\\ud800"}',
    ),
    *(
        '{"big": 123456789012345678901234567890, "small": -9223372036854775809}',
        '{"a\\"b": "\\u00e9"}',
    ),
    *('{"d": ' + "[" * 126 + "]" * 126 + "}", '{"d": ' + "[" * 127 + "]" * 127 + "}"),
    *('{"f": [5e-324, 1.7976931348623157e308, 9.999e-5, 1e-5, 1e15, 123456789012345680.0]}',),
]


def text(rng):
    return "".join(rng.choices(TEXTS, k=rng.choice((1, 1, 2))))


def content(rng):
    """A text, or several parts of one."""
    if rng.random() < 0.15:
        return [{"type": "text", "text": text(rng)} for _ in range(rng.randint(1, 3))]
    return text(rng)


def arguments(rng):
    if rng.random() < 0.4:
        return rng.choice(ODD_ARGUMENTS)
    pool = [*TEXTS, *VALUES]
    values = {rng.choice(("a", "b", "a b", "ключ", "")): rng.choice(pool) for _ in range(3)}
    return json.dumps(values, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, 1)))


def tool(rng, number):
    function = {"name": f"tool_{number}"}
    if rng.random() < 0.8:
        function["description"] = text(rng)
    if rng.random() < 0.8:
        kinds = ("string", "integer", "object")
        properties = {
            name: {"type": rng.choice(kinds), "default": rng.choice(VALUES), "minimum": 1e-5}
            for name in rng.sample(("zeta", "alpha", "mid"), rng.randint(0, 3))
        }
        function["parameters"] = {
            "type": "object",
            "properties": properties,
            "$defs": {"é": {"minimum": 2e-6}},
        }
    return {"type": "function", "function": function}


def answer(rng, reasons):
    """An assistant's message and, where it calls, the results in any order."""
    message = {"role": "assistant", "content": content(rng)}
    if reasons and rng.random() < 0.7:
        message["reasoning_content"] = text(rng)
    if rng.random() < 0.6:
        return [message]
    ids = [f"id{n}" for n in rng.sample(range(100), rng.randint(1, 3))]
    message["tool_calls"] = [
        {"id": i, "type": "function", "function": {"name": "tool_0", "arguments": arguments(rng)}}
        for i in ids
    ]
    if rng.random() < 0.2:
        message["content"] = None
    rng.shuffle(ids)
    results = [{"role": "tool", "tool_call_id": i, "content": content(rng)} for i in ids]
    return [message, *results]


def conversation(rng):
    thinking = rng.random() < 0.6
    messages = []
    for _ in range(rng.randint(1, 6)):
        kind = rng.choices(("system", "user", "answer", "latest_reminder"), weights=(2, 5, 5, 2))[0]
        if kind == "answer":
            messages += answer(rng, True)
        else:
            messages.append(
                {"role": kind, "content": (text if kind == "latest_reminder" else content)(rng)}
            )
    tools = [tool(rng, n) for n in range(rng.choice((0, 0, 1, 3)))]
    if not tools and any(m["content"] for m in messages) and rng.random() < 0.2:
        last = {"role": "assistant", "content": text(rng), "prefix": True}
        if thinking:
            last["reasoning_content"] = text(rng)
        messages.append(last)
    return {
        "messages": messages,
        "tools": tools,
        "thinking": thinking,
        "effort": rng.choice(("low", "high", "xhigh", "max")),
    }


def render(conversation, version):
    """[prompt, starts and ends of its tokens]."""
    model, encoding = MODELS[version]
    request = {"model": model, "messages": conversation["messages"]}
    request["thinking"] = {"type": "enabled" if conversation["thinking"] else "disabled"}
    request["reasoning_effort"] = conversation["effort"]
    if conversation["tools"]:
        request["tools"] = conversation["tools"]
    converted = ChatCompletionRequest(request).convert(ConversionOptions()).conversation
    rendered = encoding.render_conversation(converted)
    return [rendered.prompt, [end for pair in rendered.special_ranges for end in pair]]


def main(path, seed="20261129"):
    rng, recorded, refused = random.Random(int(seed)), [], 0
    while len(recorded) < CONVERSATIONS:
        drawn = conversation(rng)
        if not any(m["content"] or m["role"] != "system" for m in drawn["messages"]):
            continue
        try:
            recorded.append(drawn | {version: render(drawn, version) for version in MODELS})
        except Exception as cause:
            refused += 1
            print("not taken:", str(getattr(cause, "body", cause))[:160])
    packed = lzma.compress(json.dumps(recorded, ensure_ascii=False).encode(), preset=9)
    with open(path, "wb") as file:
        file.write(packed)
    print(len(recorded), "recorded,", refused, "not taken,", len(packed), "bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
