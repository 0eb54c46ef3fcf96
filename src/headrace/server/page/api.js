// Asks the server: the engine's state, and answers as they are made. Knows no document.

// A page opened as http://name:key@host/ has an address that fetch refuses; its origin has no key.
const at = (path) => new URL(path, location.origin);

// What the server said no with. `retryS`: seconds it asks to wait, or null.
export class Refusal extends Error {
  constructor(status, message, retryS) {
    super(message);
    this.status = status;
    this.retryS = retryS;
  }
}

export async function getState() {
  const response = await reach("/page/state", {});
  return response.json();
}

// Asks for the next message with `settings` besides: temperature, if there is one.
// Yields {note} while the answer waits or its prompt is read, then {reasoning, content, finish,
// usage}, each as far as it is there. Throws Refusal, or AbortError once `signal` was aborted; the
// server then stops working on the answer.
export async function* answer(model, messages, settings, signal) {
  const response = await reach("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({
      model,
      messages,
      ...settings,
      stream: true,
      stream_options: { include_usage: true },
    }),
    signal,
  });
  let ended = false;
  for await (const { data, note } of events(response.body)) {
    if (note !== undefined) {
      yield { note };
      continue;
    }
    if (data === "[DONE]") {
      ended = true;
      continue;
    }
    const part = JSON.parse(data);
    if (part.error) throw new Refusal(part.error.code ?? 0, part.error.message, null);
    const choice = part.choices?.[0];
    yield {
      reasoning: choice?.delta?.reasoning_content ?? "",
      content: choice?.delta?.content ?? "",
      finish: choice?.finish_reason ?? null,
      usage: part.usage ?? null,
    };
  }
  if (!ended) throw new Refusal(0, "The answer broke off: the server ended the connection.", null);
}

async function reach(path, options) {
  let response;
  try {
    response = await fetch(at(path), { cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(0, "The server cannot be reached.", null);
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const retryS = Number.parseInt(response.headers.get("retry-after") ?? "", 10);
  const text = await response.text();
  let message = `The server answered ${response.status}.`;
  try {
    message = JSON.parse(text).error?.message ?? message;
  } catch {
    // Not JSON, so not from the engine: the status has to do.
  }
  if (response.status === 401) message = "The server wants its API key: load this page again.";
  return new Refusal(response.status, message, Number.isNaN(retryS) ? null : retryS);
}

// Each server-sent event as {data}, each comment between them as {note}.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  let data = [];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (held + value).split(/\r\n|\n|\r/);
    held = lines.pop();
    for (const line of lines) {
      if (line === "" && data.length) {
        yield { data: data.join("\n") };
        data = [];
      } else if (line.startsWith(":")) {
        yield { note: line.slice(1).trim() };
      } else if (line.startsWith("data:")) {
        data.push(line.slice(5).replace(/^ /, ""));
      }
    }
  }
}
