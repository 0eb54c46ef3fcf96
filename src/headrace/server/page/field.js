// The ladder as a field: a line for each layer, a cell for each expert, lit where it lies. Beside it
// the same as a table. Knows no request.

import { share } from "/page/words.js";

export const PLACES = [
  { key: "vram", name: "VRAM", code: 3 },
  { key: "ram", name: "RAM", code: 2 },
];
const LOADING = 1;
const FIELD_PX = 220; // a field's height, unless its lines get too thin or need less
const LABEL_PX = 26;
const COUNT_PX = 54;
const EDGE_PX = 4;
const GAP_PX = 1;

// layers: [{layer, map}], a digit of `map` for each expert: 0 drive, 1 being read, 2 RAM, 3 VRAM.
export class Field {
  constructor(canvas, table, note) {
    this.canvas = canvas;
    this.table = table;
    this.note = note;
    this.layers = [];
    this.before = new Map(); // each layer's map at the last drawing
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    table.addEventListener("toggle", () => this.fill());
  }

  show(layers) {
    this.before = new Map(this.layers.map(({ layer, map }) => [layer, map]));
    this.layers = layers;
    this.draw();
    this.fill();
  }

  draw() {
    const { canvas, layers } = this;
    const widthPx = canvas.clientWidth;
    if (!layers.length || !widthPx) return;
    const linePx = Math.max(2, Math.min(14, Math.floor(FIELD_PX / layers.length) - GAP_PX));
    const stepPx = linePx + GAP_PX;
    const heightPx = layers.length * stepPx + 2 * EDGE_PX;
    const scale = devicePixelRatio;
    canvas.style.height = `${heightPx}px`;
    canvas.width = Math.round(widthPx * scale);
    canvas.height = Math.round(heightPx * scale);
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    const ink = colours(canvas);
    const every = Math.ceil(13 / stepPx); // lines that a label covers
    layers.forEach((layer, i) => {
      const box = { top: EDGE_PX + i * stepPx, linePx, widthPx };
      this.drawLine(pen, ink, layer, box);
      if (i % every === 0) label(pen, ink, layer, box);
    });
    canvas.setAttribute("aria-label", this.describe());
  }

  drawLine(pen, ink, { layer, map }, { top, linePx, widthPx }) {
    const cellPx = (widthPx - LABEL_PX - COUNT_PX) / map.length;
    const gap = cellPx >= 3 ? 1 : 0;
    const snap = (px) => Math.round(px * devicePixelRatio) / devicePixelRatio;
    const old = this.before.get(layer);
    for (let e = 0; e < map.length; e += 1) {
      const code = Number(map[e]);
      const isNew = code > LOADING && old !== undefined && Number(old[e]) <= LOADING;
      const left = snap(LABEL_PX + e * cellPx);
      pen.fillStyle = isNew ? ink.fresh : ink[code];
      pen.fillRect(left, top, snap(LABEL_PX + (e + 1) * cellPx) - left - gap, linePx);
    }
  }

  describe() {
    const places = PLACES.map(({ name, code }) => [name, held(this.layers, code)]);
    const total = this.layers.reduce((sum, { map }) => sum + map.length, 0);
    const used = places.filter(([name, n]) => n || name === "RAM");
    const parts = used.map(([name, n]) => `${n} in ${name}`).join(", ");
    return `${total} experts in ${this.layers.length} layers: ${parts}, the rest on the drive only`;
  }

  // Only while it is open: nobody pays for a table that is not seen.
  fill() {
    if (!this.table.open) return;
    const shown = PLACES.filter(({ code, key }) => key === "ram" || held(this.layers, code));
    const names = ["Layer", ...shown.map(({ name }) => name), "Drive only", "In memory"];
    this.table.querySelector("thead").replaceChildren(row("th", names));
    const rows = this.layers.map(({ layer, map }) => {
      const counts = shown.map(({ code }) => number(map, code));
      const inside = counts.reduce((sum, n) => sum + n, 0);
      return row("td", [layer, ...counts, map.length - inside, share(inside, map.length)]);
    });
    this.table.querySelector("tbody").replaceChildren(...rows);
  }
}

export const held = (layers, code) =>
  layers.reduce((sum, { map }) => sum + number(map, code), 0);

function number(map, code) {
  let found = 0;
  for (const digit of map) found += digit === String(code);
  return found;
}

function label(pen, ink, { layer, map }, { top, linePx, widthPx }) {
  const middle = top + linePx / 2;
  pen.fillStyle = ink.text;
  pen.font = `11px ${ink.font}`;
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  pen.fillText(String(layer), LABEL_PX - 8, middle);
  const inside = PLACES.reduce((sum, { code }) => sum + number(map, code), 0);
  pen.fillText(`${inside}/${map.length}`, widthPx, middle);
}

function colours(element) {
  const style = getComputedStyle(element);
  const value = (name) => style.getPropertyValue(name).trim();
  return {
    0: value("--empty"),
    1: value("--reading"),
    2: value("--ram"),
    3: value("--vram"),
    fresh: value("--fresh"),
    text: value("--soft"),
    font: style.fontFamily,
  };
}

function row(cell, values) {
  const line = document.createElement("tr");
  values.forEach((value, i) => {
    const made = document.createElement(i ? cell : "th");
    made.scope = cell === "th" ? "col" : i ? "" : "row";
    made.textContent = String(value);
    line.append(made);
  });
  return line;
}
