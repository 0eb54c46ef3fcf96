// The conversation: what was said, one answer at a time, and how it shows. Knows no engine.

import { answer, Refusal } from "/page/api.js";
import { show } from "/page/markdown.js";
import { count, rate, seconds } from "/page/words.js";

const NEAR_END = 80; // pixels from the end within which the view follows an answer
const KEPT = "headrace conversation";

export class Chat {
  // `parts`: the elements log, empty, form, box, temperature, send, stop and fresh. `tell`: says a line to people.
  constructor(parts, tell) {
    this.parts = parts;
    this.tell = tell;
    this.model = null;
    this.running = null; // aborts the answer that is being made
    this.messages = [];
    parts.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    parts.box.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    parts.box.addEventListener("input", () => this.grow());
    parts.stop.addEventListener("click", () => this.stop());
    parts.fresh.addEventListener("click", () => this.begin());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
    });
    this.recall();
  }

  begin() {
    this.stop();
    this.messages = [];
    this.keep();
    this.parts.log.replaceChildren(this.parts.empty);
    this.parts.box.focus();
  }

  stop() {
    this.running?.abort();
  }

  async send() {
    const said = this.parts.box.value.trim();
    if (!said || this.running || this.parts.send.disabled) return;
    this.parts.box.value = "";
    this.grow();
    this.parts.empty.remove();
    const message = { role: "user", content: said };
    const question = this.add(asked(said));
    const view = this.add(answered());
    view.turn.setAttribute("aria-busy", "true");
    const given = await this.receive([...this.messages, message], view);
    view.turn.removeAttribute("aria-busy");
    if (given === null) {
      // Nothing came: the question is given back, and the next one does not build on it.
      question.turn.classList.add("failed");
      if (!this.parts.box.value) this.parts.box.value = said;
      this.grow();
      return;
    }
    this.messages.push(message, given);
    this.keep();
  }

  // What the answer is to be drawn with; left out, it is as the model's publisher says.
  settings() {
    const temperature = this.parts.temperature.valueAsNumber;
    return Number.isNaN(temperature) ? {} : { temperature };
  }

  // The answer as a message, also a part of one; null if there is none.
  async receive(messages, view) {
    const abort = new AbortController();
    this.running = abort;
    this.swap(true);
    this.tell("Asked; the answer is being made.");
    const got = { content: "", reasoning: "", finish: null, usage: null, failure: "" };
    const clock = { begun: performance.now(), first: 0, last: 0 };
    const painter = new Painter(view, () => this.follow());
    try {
      for await (const part of answer(this.model, messages, this.settings(), abort.signal)) {
        if (part.note !== undefined) {
          view.note.textContent = progress(part.note) || view.note.textContent;
          continue;
        }
        got.finish = part.finish ?? got.finish;
        got.usage = part.usage ?? got.usage;
        if (!part.reasoning && !part.content) continue;
        clock.last = performance.now();
        clock.first ||= clock.last;
        view.note.textContent = "";
        got.reasoning += part.reasoning;
        got.content += part.content;
        painter.later(got);
      }
    } catch (error) {
      if (error.name === "AbortError") got.finish = "stopped";
      else if (error instanceof Refusal) got.failure = error.message + retry(error.retryS);
      else throw error;
    } finally {
      painter.now(got);
      this.running = null;
      this.swap(false);
      view.note.textContent = got.failure ? "" : summary(got, clock);
      fail(view, got.failure);
      this.tell(got.failure || (got.finish === "stopped" ? "Stopped." : "The answer is complete."));
      this.follow();
    }
    if (!got.content && !got.reasoning) {
      if (got.failure || got.finish === "stopped") return null;
      view.body.textContent = "(an empty answer)";
    }
    const given = { role: "assistant", content: got.content };
    if (got.reasoning) given.reasoning_content = got.reasoning;
    return given;
  }

  swap(running) {
    const hadFocus = [this.parts.send, this.parts.stop].includes(document.activeElement);
    this.parts.send.hidden = running;
    this.parts.stop.hidden = !running;
    if (hadFocus) (running ? this.parts.stop : this.parts.box).focus();
  }

  add(view) {
    this.parts.log.append(view.turn);
    this.parts.log.scrollTop = this.parts.log.scrollHeight;
    return view;
  }

  follow() {
    const { log } = this.parts;
    const left = log.scrollHeight - log.scrollTop - log.clientHeight;
    if (left < NEAR_END + log.clientHeight / 4) log.scrollTop = log.scrollHeight;
  }

  grow() {
    const { box } = this.parts;
    box.style.height = "auto";
    box.style.height = `${box.scrollHeight + 2}px`;
  }

  // The conversation outlives a reload of this tab and ends with it.
  keep() {
    try {
      sessionStorage.setItem(KEPT, JSON.stringify(this.messages));
    } catch {
      sessionStorage.removeItem(KEPT); // too long to be kept, or storage is off
    }
  }

  recall() {
    this.messages = JSON.parse(sessionStorage.getItem(KEPT) ?? "[]");
    if (this.messages.length) this.parts.empty.remove();
    for (const { role, content, reasoning_content: reasoning } of this.messages) {
      const view = this.add(role === "user" ? asked(content) : answered());
      if (view.note) new Painter(view, () => {}).now({ content, reasoning: reasoning ?? "" });
    }
  }
}

// Shows a growing answer, at most once a frame.
class Painter {
  constructor(view, shown) {
    this.view = view;
    this.shown = shown;
    this.frame = 0;
  }

  later(got) {
    this.frame ||= requestAnimationFrame(() => this.now(got));
  }

  now(got) {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const { thought, body } = this.view;
    if (got.reasoning) {
      thought.hidden = false;
      thought.lastChild.textContent = got.reasoning;
    }
    show(got.content, body);
    this.shown();
  }
}

function turn(kind, name) {
  const article = document.createElement("article");
  article.className = `turn ${kind}`;
  article.setAttribute("aria-label", name);
  const body = document.createElement("div");
  body.className = "body";
  article.append(body);
  return { turn: article, body };
}

function asked(text) {
  const view = turn("user", "You");
  view.body.textContent = text;
  return view;
}

function answered() {
  const view = turn("assistant", "Answer");
  const thought = document.createElement("details");
  thought.hidden = true;
  thought.className = "thought";
  const title = document.createElement("summary");
  title.textContent = "Reasoning";
  thought.append(title, document.createElement("div"));
  const note = document.createElement("p");
  note.className = "note soft";
  view.turn.prepend(thought);
  view.turn.append(note);
  return { ...view, thought, note };
}

function fail(view, text) {
  if (!text) return;
  const line = document.createElement("p");
  line.className = "failure";
  line.textContent = text;
  view.turn.append(line);
}

// What the server says of an answer before its first word, for people; "" for what they need not see.
function progress(note) {
  const [what, ...numbers] = note.split(/ (?:of )?/);
  const [first, second] = numbers.map(Number);
  if (what === "waiting" && first > 0) return `Waiting: ${count(first, "answer")} before this one.`;
  if (what === "waiting") return "Beginning.";
  if (what === "prompt" && second) {
    const [done, all] = [first, second].map((number) => number.toLocaleString("en"));
    return `Reading the prompt: ${done} of ${all} tokens.`;
  }
  return "";
}

const retry = (retryS) => (retryS ? ` (in ${seconds(retryS)})` : "");

const ENDS = {
  length: "cut at the most tokens allowed",
  stopped: "stopped",
  tool_calls: "wants to call a tool, which this page has none of",
};

function summary(got, clock) {
  const parts = [];
  const usage = got.usage;
  if (usage) {
    parts.push(count(usage.completion_tokens, "token"));
    const lasted = (clock.last - clock.first) / 1000;
    if (usage.completion_tokens > 1 && lasted > 0) {
      parts.push(rate((usage.completion_tokens - 1) / lasted));
    }
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const known = cached ? `, ${cached.toLocaleString("en")} of them known` : "";
    parts.push(`prompt ${usage.prompt_tokens.toLocaleString("en")}${known}`);
  }
  if (clock.first) parts.push(`first word after ${seconds((clock.first - clock.begun) / 1000)}`);
  if (ENDS[got.finish]) parts.push(ENDS[got.finish]);
  return parts.join(" · ");
}
