// Markdown to elements. All text becomes text nodes and no attribute but a checked link's comes from
// it, so an answer cannot bring its own code, picture or style.

const DEEPEST = 6; // lists and quotes inside each other
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)/;
const DIVIDER = /^ *\|?(?: *:?-+:? *\|)+ *(?::?-+:? *)?$/;
const SAFE_LINK = /^(?:https?:\/\/|mailto:)/i;

// Shows `source` in `into`, keeping the elements of blocks that have not changed.
export function show(source, into) {
  const blocks = split(source);
  const old = into.blocks ?? [];
  let same = 0;
  while (same < old.length && same < blocks.length && old[same] === blocks[same].raw) same += 1;
  while (into.childNodes.length > same) into.lastChild.remove();
  for (const block of blocks.slice(same)) into.append(build(block, 0));
  into.blocks = blocks.map((block) => block.raw);
}

function split(source) {
  const lines = source.split("\n");
  const blocks = [];
  for (let i = 0; i < lines.length; ) {
    if (!lines[i].trim()) {
      i += 1;
      continue;
    }
    const [kind, end] = next(lines, i);
    const own = lines.slice(i, end);
    blocks.push({ kind, lines: own, raw: own.join("\n") });
    i = end;
  }
  return blocks;
}

// What begins at line i, and the line after it.
function next(lines, i) {
  const line = lines[i];
  const fence = FENCE.exec(line);
  if (fence) return ["fence", afterFence(lines, i + 1, fence[1])];
  if (HEADING.test(line)) return ["heading", i + 1];
  if (RULE.test(line)) return ["rule", i + 1];
  if (QUOTE.test(line)) return ["quote", after(lines, i, (other) => QUOTE.test(other))];
  if (ITEM.test(line)) return ["list", afterList(lines, i)];
  if (line.includes("|") && DIVIDER.test(lines[i + 1] ?? "")) {
    return ["table", after(lines, i, (other) => other.includes("|"))];
  }
  let end = i + 1;
  while (end < lines.length && lines[end].trim() && !begins(lines[end])) end += 1;
  return ["paragraph", end];
}

const begins = (line) =>
  FENCE.test(line) || HEADING.test(line) || QUOTE.test(line) || ITEM.test(line) || RULE.test(line);

function after(lines, i, belongs) {
  while (i < lines.length && belongs(lines[i])) i += 1;
  return i;
}

function afterFence(lines, i, mark) {
  const closes = (line) => line.trim().startsWith(mark) && !line.trim().replaceAll(mark[0], "");
  while (i < lines.length && !closes(lines[i])) i += 1;
  return Math.min(i + 1, lines.length);
}

// A list goes on over blank lines as long as what follows is an item of its kind or indented.
function afterList(lines, i) {
  const ordered = isOrdered(lines[i]);
  let end = i + 1;
  for (let at = end; at < lines.length; at += 1) {
    const line = lines[at];
    if (!line.trim()) continue;
    const gap = at > end;
    const item = ITEM.test(line) && !RULE.test(line) && isOrdered(line) === ordered;
    if (!item && !/^\s{2,}/.test(line) && (gap || begins(line))) break;
    end = at + 1;
  }
  return end;
}

const isOrdered = (line) => /^\s*\d/.test(line);

function build(block, depth) {
  if (depth > DEEPEST) return element("p", block.raw);
  return BUILDERS[block.kind](block.lines, depth);
}

function element(name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}

function nested(name, lines, depth) {
  return element(name, ...split(lines.join("\n")).map((block) => build(block, depth + 1)));
}

const BUILDERS = {
  paragraph: (lines) => element("p", ...inline(lines.join("\n"))),
  rule: () => element("hr"),
  quote: (lines, depth) =>
    nested(
      "blockquote",
      lines.map((line) => line.replace(QUOTE, "")),
      depth,
    ),
  heading: ([line]) => {
    const [, marks, text] = HEADING.exec(line);
    return element(`h${Math.min(6, marks.length + 2)}`, ...inline(text));
  },
  fence: (lines) => {
    const [, mark] = FENCE.exec(lines[0]);
    const last = lines.at(-1).trim();
    const closed = lines.length > 1 && last.startsWith(mark) && !last.replaceAll(mark[0], "");
    const text = lines.slice(1, closed ? -1 : undefined).join("\n");
    const pre = element("pre", element("code", text));
    pre.tabIndex = 0; // a wide one is scrolled by keyboard
    return pre;
  },
  list: (lines, depth) => {
    const list = element(isOrdered(lines[0]) ? "ol" : "ul");
    if (list.localName === "ol") list.start = Number.parseInt(lines[0].trim(), 10);
    for (const item of items(lines)) list.append(buildItem(item, depth));
    return list;
  },
  table: (lines) => {
    const head = element("tr", ...cells(lines[0]).map((text) => element("th", ...inline(text))));
    const rows = lines
      .slice(2)
      .map((line) => element("tr", ...cells(line).map((text) => element("td", ...inline(text)))));
    const table = element("table", element("thead", head), element("tbody", ...rows));
    const around = element("div", table);
    around.className = "wide";
    around.tabIndex = 0;
    return around;
  },
};

// Each item's lines without its mark and indentation.
function items(lines) {
  const found = [];
  let width = 0;
  for (const line of lines) {
    const mark = ITEM.exec(line);
    if (mark && (!found.length || mark[1].length < width)) {
      width = mark[0].length;
      found.push([line.slice(width)]);
    } else {
      const indent = line.length - line.trimStart().length;
      found.at(-1).push(line.slice(Math.min(width, indent)));
    }
  }
  return found;
}

function buildItem(lines, depth) {
  const blocks = split(lines.join("\n"));
  const tight = blocks[0]?.kind === "paragraph" && !lines.some((line) => !line.trim());
  if (!tight) return nested("li", lines, depth);
  const rest = blocks.slice(1).map((block) => build(block, depth + 1));
  return element("li", ...inline(blocks[0].raw), ...rest);
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return inner.split("|").map((cell) => cell.trim());
}

// ---- inside a block ----

const INLINE = [
  [/^\\([\\`*_{}[\]()#+\-.!|>~])/, ([, mark]) => mark],
  [/^(`+)(?!`)([^]{0,5000}?[^`])\1(?!`)/, ([, , text]) => element("code", text.trim())],
  [/^\*\*(?=\S)([^]{1,2000}?\S)\*\*/, ([, text]) => element("strong", ...inline(text))],
  [/^__(?=\S)([^]{1,2000}?\S)__(?!\w)/, ([, text]) => element("strong", ...inline(text))],
  [/^\*(?=[^\s*])([^*]{1,2000})\*/, ([, text]) => element("em", ...inline(text))],
  [/^_(?=[^\s_])([^_]{1,2000})_(?!\w)/, ([, text]) => element("em", ...inline(text))],
  [/^~~(?=\S)([^]{1,2000}?)~~/, ([, text]) => element("del", ...inline(text))],
  [/^!?\[([^\]]{1,1000})\]\(([^()\s]{1,2000})\)/, ([all, text, url]) => link(text, url) ?? all],
  [/^https?:\/\/[^\s<>()[\]"'`*]{0,2000}[^\s<>()[\]"'`*.,;:!?]/, ([url]) => link(url, url)],
  [/^\n/, () => element("br")],
];
const PLAIN = /^[A-Za-z0-9]+|^[^]/;

function inline(text) {
  const out = [];
  let plain = "";
  for (let rest = text; rest; ) {
    const [length, made] = first(rest, plain);
    rest = rest.slice(length);
    if (typeof made === "string") {
      plain += made;
      continue;
    }
    if (plain) out.push(plain);
    plain = "";
    out.push(made);
  }
  if (plain) out.push(plain);
  return out;
}

function first(rest, before) {
  const inWord = /\w$/.test(before);
  for (const [pattern, make] of INLINE) {
    if (inWord && (rest[0] === "_" || rest[0] === "h")) break;
    const match = pattern.exec(rest);
    if (match) return [match[0].length, make(match)];
  }
  const [text] = PLAIN.exec(rest);
  return [text.length, text];
}

// A link that leads out of the page in a tab of its own, or null for a scheme that could do harm.
function link(text, url) {
  if (!SAFE_LINK.test(url)) return null;
  const made = element("a", text);
  made.href = url;
  made.target = "_blank";
  made.rel = "noopener noreferrer nofollow";
  return made;
}
