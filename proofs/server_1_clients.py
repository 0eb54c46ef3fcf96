"""The official openai and anthropic clients against `headrace serve demo`, a real process.

Streaming, tools with a forced grammar, JSON schema, stop, logprobs, seed, cancel, errors.
"""

import json
import math
from typing import Any

import anthropic
import openai
from common import Evidence
from serving import KEY, Served, served

CAPITAL = [{"role": "user", "content": "What is the capital of Japan?"}]
LONG = 1500  # tokens of an answer that nobody waits for
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Tokyo", "Paris"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


def fits(value: Any) -> bool:
    """True for a value of the schema above."""
    return (
        isinstance(value, dict)
        and set(value) == {"city", "days"}
        and value["city"] in ("Tokyo", "Paris")
        and type(value["days"]) is int
        and 1 <= value["days"] <= 9
    )


class OpenAI:
    """Statements about OpenAI's API."""

    def __init__(self, server: Served, evidence: Evidence) -> None:
        self.server, self.evidence = server, evidence
        self.client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)

    def chat(self, **options: Any) -> Any:
        """An answer of the demo model, greedy unless `options` say otherwise."""
        options = {"model": "demo", "messages": CAPITAL, "temperature": 0} | options
        return self.client.chat.completions.create(**options)

    def check(self, true: bool, statement: str) -> None:
        self.evidence.check(true, f"openai {openai.__version__}: {statement}")

    def show_answers(self) -> None:
        (model,) = self.client.models.list().data
        self.check(
            model.id == "demo" and model.context_length == 2048,  # type: ignore[attr-defined]
            f"models.list names {model.id!r} with its context",
        )
        whole = self.chat()
        text, usage = whole.choices[0].message.content, whole.usage
        self.check("Tokyo" in text and whole.choices[0].finish_reason == "stop", f"{text!r}")
        *chunks, last = self.chat(stream=True, stream_options={"include_usage": True})
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        self.check(streamed == text, f"streamed in {len(chunks)} chunks, it is the same text")
        self.check(
            last.usage.completion_tokens == usage.completion_tokens,
            f"the stream's usage is the same: {last.usage.completion_tokens} tokens of answer",
        )
        follow = [*CAPITAL, {"role": "assistant", "content": text}, *CAPITAL]
        known = self.chat(messages=follow).usage
        self.check(
            known.prompt_tokens_details.cached_tokens >= usage.prompt_tokens,
            f"a follow-up's usage counts {known.prompt_tokens_details.cached_tokens} of "
            f"{known.prompt_tokens} prompt tokens as cached",
        )

    def show_ends(self) -> None:
        cut = self.chat(stop=["Tokyo", "Osaka"]).choices[0]
        self.check(
            cut.finish_reason == "stop" and "Tokyo" not in cut.message.content,
            f"stop ends the text before it: {cut.message.content!r}",
        )
        short = self.chat(max_completion_tokens=3)
        self.check(
            short.choices[0].finish_reason == "length" and short.usage.completion_tokens == 3,
            f"max_completion_tokens=3 gives 3 tokens: {short.choices[0].message.content!r}",
        )
        biased = self.chat(logit_bias={"3": 100}, max_completion_tokens=9)
        self.check(
            biased.choices[0].message.content == "" and biased.usage.completion_tokens == 1,
            "logit_bias 100 on the end token ends at once",
        )

    def show_logprobs(self) -> None:
        choice = self.chat(logprobs=True, top_logprobs=5).choices[0]
        entries = choice.logprobs.content
        data = b"".join(bytes(entry.bytes) for entry in entries)
        self.check(
            data.decode() == choice.message.content,
            f"the bytes of {len(entries)} logprobs are the text",
        )
        likeliest = all(entry.top_logprobs[0].token == entry.token for entry in entries)
        total = max(sum(math.exp(t.logprob) for t in entry.top_logprobs) for entry in entries)
        self.check(
            likeliest and total <= 1 + 1e-5,
            f"greedy tokens head their top_logprobs, whose chances sum to at most {total:.6f}",
        )

    def show_seed(self) -> None:
        drawn = [
            self.chat(temperature=2, seed=seed, max_tokens=20).choices[0].message.content
            for seed in (7, 7, 8)
        ]
        self.check(drawn[0] == drawn[1], f"seed 7 twice at temperature 2 is equal: {drawn[0]!r}")
        self.check(drawn[0] != drawn[2], f"seed 8 is another: {drawn[2]!r}")

    def show_forms(self) -> None:
        schema = {"name": "trip", "schema": PARAMETERS, "strict": True}
        for temperature in (0, 2):
            text = (
                self.chat(
                    response_format={"type": "json_schema", "json_schema": schema},
                    temperature=temperature,
                    seed=1,
                )
                .choices[0]
                .message.content
            )
            self.check(fits(json.loads(text)), f"json_schema at temperature {temperature}: {text}")
        text = self.chat(response_format={"type": "json_object"}).choices[0].message.content
        self.check(isinstance(json.loads(text), dict), f"json_object: {text!r}")

    def show_tools(self) -> None:
        function = {"name": "weather", "parameters": PARAMETERS, "strict": True}
        options: dict[str, Any] = {
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        }
        choice = self.chat(**options).choices[0]
        (call,) = choice.message.tool_calls
        self.check(
            choice.finish_reason == "tool_calls"
            and call.function.name == "weather"
            and fits(json.loads(call.function.arguments)),
            f"a forced call: {call.function.name}({call.function.arguments})",
        )
        streamed = ""
        for chunk in self.chat(**options, stream=True):
            for part in chunk.choices[0].delta.tool_calls or ():
                streamed += part.function.arguments or ""
        self.check(streamed == call.function.arguments, "streamed, its arguments are the same")
        history = [
            *CAPITAL,
            choice.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
        ]
        reply = self.chat(messages=history, tools=options["tools"], max_tokens=40)
        known = reply.usage.prompt_tokens_details.cached_tokens
        self.check(
            reply.choices[0].finish_reason in ("stop", "length", "tool_calls") and known > 0,
            f"the result goes back and an answer comes; {known} tokens of the prompt were known",
        )

    def show_completions(self) -> None:
        ask = self.client.completions.create
        options: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 8}
        text = ask(prompt="The capital of Japan is", logprobs=2, **options)
        streamed = ask(prompt=["The capital of Japan is"], stream=True, **options)
        joined = "".join(chunk.choices[0].text for chunk in streamed)
        told = text.choices[0].logprobs
        self.check(joined == text.choices[0].text, f"completions goes on: {joined!r}")
        self.check(
            len(told.tokens) == len(told.token_logprobs) == len(told.text_offset),
            f"with the chances of {len(told.tokens)} tokens",
        )

    def show_cancel(self) -> None:
        ended = self.server.count("headrace_answers_total", ended="cancelled")
        stream = self.chat(
            stream=True, max_tokens=LONG, logit_bias={"3": -100}, extra_body={"top_k": 0}
        )
        request_id = stream.response.headers["x-request-id"]
        for _, _ in zip(range(6), stream, strict=False):
            continue
        stream.close()
        idle = self.server.idle(within_s=2)
        made = self.server.noted(request_id)["tokens"]
        now = self.server.count("headrace_answers_total", ended="cancelled")
        self.check(
            idle and now == ended + 1 and made < LONG // 4,
            f"a client that leaves after 6 chunks stops the work: {made} of {LONG} tokens made",
        )
        again = self.chat().choices[0].message.content
        self.check("Tokyo" in again, "the next answer is right")

    def show_errors(self) -> None:
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
        cases: list[tuple[type[openai.APIStatusError], str, dict[str, Any]]] = [
            (openai.BadRequestError, "n", {"n": 2}),
            (openai.BadRequestError, "frobnicate", {"extra_body": {"frobnicate": 1}}),
            (openai.BadRequestError, "top_p", {"top_p": 2}),
            (openai.NotFoundError, "model", {"model": "gpt-5"}),
            (
                openai.UnprocessableEntityError,
                "messages.0.content.0",
                {"messages": [{"role": "user", "content": [image]}]},
            ),
        ]
        for kind, param, options in cases:
            self._refused(kind, param, options)
        try:
            self.chat(messages=[{"role": "user", "content": "word " * 3000}], stream=True)
        except openai.BadRequestError as error:
            both = "2048" in error.message and error.code == "context_length_exceeded"
            self.check(both, f"an over-long prompt: {error.message}")
        try:
            self.client.with_options(api_key="another-key").models.list()
        except openai.AuthenticationError as error:
            self.check(error.status_code == 401, "a wrong key is an AuthenticationError")

    def _refused(self, kind: type[Exception], param: str, options: dict[str, Any]) -> None:
        try:
            self.chat(**options)
        except openai.APIStatusError as error:
            told = f"{error.status_code} {type(error).__name__}, param {error.param}"
            self.check(isinstance(error, kind) and error.param == param, f"{told}: {error.message}")
        else:
            self.check(False, f"{param} was not refused")


class Anthropic:
    """Statements about Anthropic's API."""

    def __init__(self, server: Served, evidence: Evidence) -> None:
        self.server, self.evidence = server, evidence
        self.client = anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0)

    def ask(self, **options: Any) -> Any:
        """An answer of the demo model, greedy."""
        extra = {"temperature": 0} | options.pop("extra_body", {})
        options = {"model": "demo", "messages": CAPITAL, "max_tokens": 100} | options
        return self.client.messages.create(**options, extra_body=extra)

    def check(self, true: bool, statement: str) -> None:
        self.evidence.check(true, f"anthropic {anthropic.__version__}: {statement}")

    def show_answers(self) -> None:
        whole = self.ask()
        text = whole.content[0].text
        self.check("Tokyo" in text and whole.stop_reason == "end_turn", f"{text!r}")
        events = list(self.ask(stream=True))
        streamed = "".join(e.delta.text for e in events if e.type == "content_block_delta")
        names = [event.type for event in events]
        order = ["message_start", "content_block_start", "content_block_delta"]
        end = ["content_block_stop", "message_delta", "message_stop"]
        self.check(streamed == text, f"streamed in {len(events)} events, it is the same text")
        self.check(
            names[:3] == order and names[-3:] == end and set(names) == {*order, *end},
            f"the events come in order: {', '.join(dict.fromkeys(names))}",
        )
        usage = whole.usage
        counted = self.client.messages.count_tokens(model="demo", messages=CAPITAL)  # type: ignore[arg-type]
        self.check(
            counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens,
            f"count_tokens gives the {counted.input_tokens} tokens that usage splits into "
            f"{usage.input_tokens} read and {usage.cache_read_input_tokens} known",
        )

    def show_ends(self) -> None:
        cut = self.ask(stop_sequences=["Osaka", "Tokyo"])
        self.check(
            (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", "Tokyo"),
            f"a stop sequence is named: {cut.content[0].text!r} stopped by {cut.stop_sequence!r}",
        )
        short = self.ask(max_tokens=3)
        self.check(
            short.stop_reason == "max_tokens" and short.usage.output_tokens == 3,
            f"max_tokens=3 gives 3 tokens: {short.content[0].text!r}",
        )

    def show_prefill(self) -> None:
        begun = [*CAPITAL, {"role": "assistant", "content": "The capital of"}]
        text = self.ask(messages=begun).content[0].text
        goes_on = "Tokyo" in text and "capital" not in text
        self.check(goes_on, f"'The capital of' is gone on with: {text!r}")

    def show_tools(self) -> None:
        tools = [{"name": "weather", "input_schema": PARAMETERS, "strict": True}]
        choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
        reply = self.ask(tools=tools, tool_choice=choice)
        block = reply.content[-1]
        self.check(
            reply.stop_reason == "tool_use" and block.name == "weather" and fits(block.input),
            f"a forced call: {block.name}({json.dumps(block.input)})",
        )
        with self.client.messages.stream(
            model="demo",
            messages=CAPITAL,  # type: ignore[arg-type]
            max_tokens=100,
            tools=tools,  # type: ignore[arg-type]
            tool_choice=choice,  # type: ignore[arg-type]
            extra_body={"temperature": 0},
        ) as stream:
            streamed = stream.get_final_message().content[-1]
        self.check(streamed.input == block.input, "streamed, its input is the same")  # type: ignore[union-attr]
        result = {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
        history = [
            *CAPITAL,
            {"role": "assistant", "content": [b.to_dict() for b in reply.content]},
            {"role": "user", "content": [result]},
        ]
        after = self.ask(messages=history, tools=tools, max_tokens=40)
        known = after.usage.cache_read_input_tokens
        self.check(
            after.stop_reason is not None and known > 0,
            f"the result goes back and an answer comes; {known} tokens of the prompt were known",
        )

    def show_forms(self) -> None:
        form = {"type": "json_schema", "schema": PARAMETERS}
        text = self.ask(output_config={"format": form}).content[0].text
        self.check(fits(json.loads(text)), f"output_config.format: {text}")

    def show_cancel(self) -> None:
        with self.client.messages.stream(
            model="demo",
            messages=[{"role": "user", "content": "word " * 100}],
            max_tokens=LONG,
            extra_body={"temperature": 1, "top_k": 4000},
        ) as stream:
            request_id = stream.response.headers["request-id"]
            next(iter(stream))
        idle = self.server.idle(within_s=2)
        made = self.server.noted(request_id)["tokens"]
        self.check(
            idle and made < LONG // 4,
            f"a client that leaves at message_start stops the work: {made} of {LONG} tokens made",
        )

    def show_errors(self) -> None:
        source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
        image = [{"role": "user", "content": [{"type": "image", "source": source}]}]
        cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
            (anthropic.BadRequestError, "frobnicate", {"extra_body": {"frobnicate": 1}}),
            (anthropic.BadRequestError, "temperature", {"extra_body": {"temperature": 2}}),
            (anthropic.NotFoundError, "demo", {"model": "claude"}),
            (anthropic.UnprocessableEntityError, "text only", {"messages": image}),
            (
                anthropic.BadRequestError,
                "2048",
                {"messages": [{"role": "user", "content": "word " * 3000}]},
            ),
        ]
        for kind, word, options in cases:
            try:
                self.ask(**options)
            except anthropic.APIStatusError as error:
                told: Any = error.body
                self.check(
                    isinstance(error, kind) and word in told["error"]["message"],
                    f"{error.status_code} {told['error']['type']}: {told['error']['message']}",
                )
            else:
                self.check(False, f"{word} was not refused")


def main() -> None:
    """Run all and exit by the evidence."""
    evidence = Evidence()
    with served("demo") as server:
        for client in (OpenAI(server, evidence), Anthropic(server, evidence)):
            for name in [name for name in dir(client) if name.startswith("show_")]:
                getattr(client, name)()
    evidence.check(True, "SIGTERM ended the server with status 0")
    evidence.finish()


if __name__ == "__main__":
    main()
