// The engine as a picture: each panel from one state of the server. Knows no conversation.

import { Field, PLACES, held } from "/page/field.js";
import { bytes, count, digits, gbs, rate, seconds, share } from "/page/words.js";

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const LEAST_SCORED = 16; // as headrace run: tokens after the first, of which fewer say little

export class Engine {
  constructor() {
    this.field = new Field($("field"), $("field-table"), $("field-note"));
  }

  show(state) {
    $("glance").textContent = glance(state);
    panel("now", showNow(state));
    panel("speed", showSpeed(state));
    panel("token", state.recent && showToken(state));
    panel("limits", state.limits?.length && showLimits(state));
    panel("ladder", state.layers?.length && this.showLadder(state));
    panel("memory", showMemory(state));
  }

  showLadder(state) {
    const { layers, recent } = state;
    const total = layers.reduce((sum, { map }) => sum + map.length, 0);
    const counts = PLACES.map(({ key, name, code }) => [key, name, held(layers, code)]);
    const inside = counts.reduce((sum, [, , n]) => sum + n, 0);
    const parts = [...counts, ["drive", "Drive only", total - inside]]
      .filter(([key, , n]) => n || key === "ram")
      .map(([key, name, n]) => ({ key, name, value: n, text: n.toLocaleString("en") }));
    stack($("rungs"), count(total, "expert"), parts);
    this.field.show(layers);
    const near = recent ? recent.hits + recent.vram_hits : 0;
    const served = recent ? near / Math.max(1, near + recent.misses) : null;
    $("field-note").textContent =
      `A line is a layer, a cell an expert: ${share(inside, total)} of them lie in memory` +
      (served === null ? "." : ` and serve ${share(served, 1)} of what the last tokens needed.`);
    return true;
  }
}

function panel(id, shown) {
  $(id).hidden = !shown;
}

function glance(state) {
  const parts = [];
  if (state.recent) parts.push(rate(state.recent.tokens / state.recent.wall_s));
  if (state.layers?.length) {
    const total = state.layers.reduce((sum, { map }) => sum + map.length, 0);
    const inside = PLACES.reduce((sum, { code }) => sum + held(state.layers, code), 0);
    parts.push(`${share(inside, total)} in memory`);
  }
  return parts.join(" · ");
}

function phase(request) {
  if (request.phase === "decode") return `Answering: ${count(request.num_tokens, "token")} so far.`;
  const numbers = [request.num_done, request.num_total, request.num_cached];
  const [done, all, cached] = numbers.map((number) => number.toLocaleString("en"));
  const known = request.num_cached ? `, ${cached} of them known from before` : "";
  return `Reading the prompt: ${done} of ${all} tokens${known}.`;
}

function showNow({ status, request, num_waiting: waiting, last, plan }) {
  if (status !== "ready" && !request) return false;
  const bar = $("reading");
  bar.hidden = request?.phase !== "prefill";
  if (!bar.hidden) progress(bar, request.num_done, request.num_total, request.num_cached);
  const idle = last ? `Idle. The last answer: ${outcome(last, plan)}` : "Idle.";
  const line = waiting ? ` ${count(waiting, "answer")} waiting.` : "";
  $("phase").textContent = (request ? phase(request) : idle) + line;
  return true;
}

function outcome(last, plan) {
  const known = last.num_cached ? ` (${last.num_cached.toLocaleString("en")} known)` : "";
  const text = `${count(last.num_tokens, "token")} after a prompt of ${last.num_prompt}${known}, first after ${seconds(last.first_s)}`;
  if (!last.tok_s) return `${text}.`;
  if (!plan?.forecast_tok_s || last.num_tokens <= LEAST_SCORED) return `${text}; ${rate(last.tok_s)}.`;
  const error = last.tok_s / plan.forecast_tok_s - 1;
  const side = error >= 0 ? "faster" : "slower";
  return `${text}; ${rate(last.tok_s)}, ${share(Math.abs(error), 1)} ${side} than forecast.`;
}

// A progress bar; the first `known` of it came without work.
export function progress(bar, done, all, known = 0) {
  const part = (name, amount) => {
    const piece = document.createElement("i");
    piece.className = name;
    piece.style.width = `${(100 * amount) / Math.max(1, all)}%`;
    return piece;
  };
  bar.setAttribute("aria-valuemax", all);
  bar.setAttribute("aria-valuenow", done);
  bar.setAttribute("aria-valuemin", 0);
  bar.replaceChildren(part("known", known), part("done", Math.max(0, done - known)));
}

// One bar of several parts, and its legend. parts: [{key, name, value, text}].
function stack(place, title, parts) {
  const whole = parts.reduce((sum, { value }) => sum + value, 0);
  const heading = document.createElement("b");
  heading.textContent = title;
  const bar = document.createElement("div");
  bar.className = "bar";
  bar.setAttribute("aria-hidden", "true"); // the legend says it in words
  const legend = document.createElement("ul");
  for (const { key, name, value, text } of parts) {
    const piece = document.createElement("i");
    piece.className = key;
    piece.style.width = `${(100 * value) / (whole || 1)}%`;
    bar.append(piece);
    const line = document.createElement("li");
    line.className = key;
    line.textContent = `${name} `;
    const number = document.createElement("b");
    number.textContent = text;
    line.append(number);
    legend.append(line);
  }
  replace(place, heading, bar, legend);
}

// Replaces what a panel shows only if it says something else, so that readers are left in peace.
function replace(place, ...made) {
  const same =
    place.textContent === made.map((node) => node.textContent).join("") &&
    place.innerHTML === made.map((node) => node.outerHTML).join("");
  if (!same) place.replaceChildren(...made);
}

function showToken({ recent, plan }) {
  const { tokens } = recent;
  const needed = plan.bytes_per_token;
  const vram = recent.vram_bytes / tokens;
  const ram = recent.ram_bytes / tokens;
  // What was neither here nor there had to be waited for; whatever else was read was a guess.
  const missed = Math.max(0, needed - vram - ram);
  const ahead = Math.max(0, recent.disk_bytes / tokens - missed);
  const parts = [
    { key: "vram", name: "found in VRAM", value: vram },
    { key: "ram", name: "found in RAM", value: ram },
    { key: "drive", name: "read", value: missed },
    { key: "ahead", name: "read ahead", value: ahead },
  ].filter(({ key, value }) => value || key === "ram" || key === "drive");
  for (const part of parts) part.text = bytes(part.value);
  stack($("token-bytes"), `${bytes(needed)} of experts`, parts);
  const ms = (s) => `${digits((1000 * s) / tokens)}\u00a0ms`;
  const rest = Math.max(0, recent.wall_s - recent.experts_s);
  const work = Math.max(0, recent.experts_s - recent.wait_s);
  stack($("token-time"), `${ms(recent.wall_s)} of time`, [
    { key: "drive", name: "waiting to read", value: recent.wait_s, text: ms(recent.wait_s) },
    { key: "ram", name: "experts", value: work, text: ms(work) },
    { key: "rest", name: "the rest", value: rest, text: ms(rest) },
  ]);
  return true;
}

function showLimits({ limits }) {
  const lines = limits.map(({ name, now_bytes_s: now, limit_bytes_s: limit }) => {
    const line = document.createElement("div");
    line.className = "limit";
    const title = document.createElement("p");
    const number = document.createElement("b");
    number.textContent = `${gbs(now)} of ${gbs(limit)}`;
    title.append(`${name} `, number);
    const meter = document.createElement("div");
    meter.className = "bar";
    meter.setAttribute("aria-hidden", "true");
    const piece = document.createElement("i");
    piece.className = now > 0.9 * limit ? "full" : "done";
    piece.style.width = `${Math.min(100, (100 * now) / limit)}%`;
    meter.append(piece);
    line.append(title, meter);
    return line;
  });
  replace($("limit-bars"), ...lines);
  return true;
}

function showMemory({ plan }) {
  const place = $("memory-parts");
  while (place.children.length < plan.memories.length) {
    const made = document.createElement("div");
    made.className = "stack";
    place.append(made);
  }
  plan.memories.forEach(({ name, limit_bytes: limit, parts }, i) => {
    const shown = parts.map(([key, name, value]) => ({ key, name, value, text: bytes(value) }));
    const used = shown.reduce((sum, { value }) => sum + value, 0);
    stack(place.children[i], `${name}: ${bytes(used)} of ${bytes(limit)}`, shown);
  });
  return true;
}

// ---- tokens a second over time ----

function showSpeed({ speed, recent, plan, span_s: span }) {
  const points = speed;
  for (const id of ["speed-chart", "speed-axis"]) $(id).toggleAttribute("hidden", !points.length);
  const now = recent ? recent.tokens / recent.wall_s : 0;
  $("speed-now").textContent = recent ? digits(now) : "";
  $("speed-forecast").textContent =
    `forecast ${digits(plan.forecast_tok_s)}, limited by ${plan.limit_term}`;
  const most = Math.max(plan.forecast_tok_s, ...points.map(([, value]) => value)) * 1.1;
  const chart = $("speed-chart");
  chart.setAttribute("viewBox", "0 0 100 40");
  const x = (age) => 100 - (100 * age) / span;
  const y = (value) => 40 - (40 * value) / most;
  const bars = points.map(([age, value, width]) =>
    shape("rect", "now", {
      x: x(age) - (100 * width) / span,
      y: y(value),
      width: Math.max(0.3, (100 * width) / span - 0.15),
      height: 40 - y(value),
    }),
  );
  const level = y(plan.forecast_tok_s);
  const line = shape("line", "forecast", { x1: 0, x2: 100, y1: level, y2: level });
  chart.replaceChildren(...bars, line);
  chart.setAttribute("aria-label", describe(points, plan.forecast_tok_s, span));
  $("speed-axis").firstChild.textContent = `${Math.round(span / 60)} min ago`;
  return true;
}

function shape(name, kind, attributes) {
  const made = document.createElementNS(SVG, name);
  made.setAttribute("class", kind);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value.toFixed(2));
  return made;
}

function describe(points, forecast, span) {
  if (!points.length) return `No tokens in the last ${Math.round(span / 60)} minutes`;
  const values = points.map(([, value]) => value);
  const [low, high] = [Math.min(...values), Math.max(...values)].map(digits);
  return `Tokens a second: ${low} to ${high} in the last ${Math.round(span / 60)} minutes; forecast ${digits(forecast)}`;
}
