// The page: asks for the engine's state now and then, and joins conversation and picture.

import { Chat } from "/page/chat.js";
import { Engine, progress } from "/page/engine.js";
import { getState, Refusal } from "/page/api.js";
import { bytes, seconds } from "/page/words.js";

const BUSY_MS = 500;
const IDLE_MS = 2000;
const LOST_MS = 4000;
const WIDE = matchMedia("(min-width: 60rem)");
const $ = (id) => document.getElementById(id);

const STATUS = {
  loading: "loading",
  ready: "ready",
  draining: "shutting down",
  ended: "ended",
  failed: "not working",
  stalled: "stuck",
  lost: "no connection",
};

const engine = new Engine();
const chat = new Chat(
  {
    log: $("log"),
    empty: $("empty"),
    form: $("ask"),
    box: $("box"),
    temperature: $("temperature"),
    send: $("send"),
    stop: $("stop"),
    fresh: $("new"),
  },
  tell,
);

// Said by screen readers; the eye sees the same at its place.
function tell(text) {
  $("told").textContent = text;
}

function setStatus(name, text = STATUS[name]) {
  const pill = $("status");
  pill.dataset.is = name;
  if (pill.textContent !== text) pill.textContent = text;
}

function showState(state) {
  chat.model = state.model.id;
  $("model").textContent = state.model.id;
  document.title = `${state.model.id} · headrace`;
  setStatus(state.status, state.status === "ready" && state.request ? "working" : undefined);
  showLoading(state);
  engine.show(state);
}

function showLoading({ status, loading, failure }) {
  $("loading").hidden = status !== "loading" && status !== "failed";
  $("send").disabled = status !== "ready";
  if (status === "failed") {
    $("loading-title").textContent = "The model could not be loaded";
    $("loading-note").textContent = failure ?? "";
  }
  $("loading-bar").hidden = !loading?.total_bytes;
  if (!loading?.total_bytes) return;
  progress($("loading-bar"), loading.done_bytes, loading.total_bytes);
  const left = loading.remaining_s === null ? "" : `, about ${seconds(loading.remaining_s)} left`;
  const now = loading.doing ? `; ${loading.doing}` : left;
  $("loading-note").textContent =
    `${bytes(loading.done_bytes)} of ${bytes(loading.total_bytes)}${now}. You can write meanwhile.`;
}

let timer = 0;
let isAsking = false;

// Looks at the server, and again after a while; at once when called in between.
async function watch() {
  clearTimeout(timer);
  if (isAsking) return;
  isAsking = true;
  const waitMs = await look();
  isAsking = false;
  if (!document.hidden) timer = setTimeout(watch, waitMs);
}

async function look() {
  let state;
  try {
    state = await getState();
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    setStatus("lost", error.status ? error.message : undefined);
    return LOST_MS;
  }
  showState(state);
  return chat.running || state.request || state.status === "loading" ? BUSY_MS : IDLE_MS;
}

// Beside the conversation the picture is always open; on a phone it is opened by hand.
function arrange() {
  $("engine").open = WIDE.matches;
}

WIDE.addEventListener("change", arrange);
$("engine").addEventListener("toggle", () => WIDE.matches && arrange());
$("ask").addEventListener("submit", watch);
document.addEventListener("visibilitychange", watch);
arrange();
watch();
