// Markdown to DOM elements, never through HTML source, so that model output cannot inject markup.

import { highlight } from "./highlight.js";

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const BLANK = /^\s*$/;
const SAFE_LINK = /^(https?:|mailto:)/i;
// Nesting limit: a long run of ">" would exhaust the stack.
const MAX_DEPTH = 12;

function element(name, className, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

const INLINE = [
  ["escape", /\\([\\`*_{}[\]()#+\-.!~|<>])/y],
  ["code", /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)/y],
  ["image", /!\[([^\]]*)\]\(\s*<?([^\s)>]+)>?(?:\s+"[^"]*")?\s*\)/y],
  ["link", /\[((?:[^[\]]|\[[^\]]*\])*)\]\(\s*<?((?:[^\s()>]|\([^\s()]*\))+)>?(?:\s+"[^"]*")?\s*\)/y],
  ["url", /<?(https?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]*_])>?/y],
  ["strong", /(\*\*|__)(?=\S)([\s\S]*?\S)\1(?!\*)/y],
  ["emphasis", /([*_])(?=[^\s*_])((?:[^*_]|\*\*[^*]+\*\*|_(?=\w))*?[^\s*_]|[^\s*_])\1/y],
  ["strike", /~~(?=\S)([\s\S]*?\S)~~/y],
  ["break", /(?: {2,}|\\)\n/y],
];

// Characters that can start an inline element; text up to the next one is copied at once.
const MARK = /[\\`!\[<*_~h ]/g;

function anchor(address, ...children) {
  if (!SAFE_LINK.test(address)) return element("span", "", ...children);
  const made = element("a", "", ...children);
  made.href = address;
  made.target = "_blank";
  made.rel = "noopener noreferrer";
  return made;
}

function inlineNode(kind, match, depth) {
  const inner = (text) => inline(text, depth + 1);
  if (kind === "escape") return match[1];
  if (kind === "code") return element("code", "", match[2].replace(/\n/g, " ").replace(/^ (.*\S.*) $/, "$1"));
  // An image would be fetched from another server, so it becomes a link.
  if (kind === "image") return anchor(match[2], match[1] || match[2]);
  if (kind === "link") return anchor(match[2], ...inner(match[1]));
  if (kind === "url") return anchor(match[1], match[1]);
  if (kind === "strong") return element("strong", "", ...inner(match[2]));
  if (kind === "emphasis") return element("em", "", ...inner(match[2]));
  if (kind === "strike") return element("s", "", ...inner(match[1]));
  return element("br");
}

/** Returns inline Markdown as an array of nodes and strings. */
export function inline(text, depth = 0) {
  if (depth > MAX_DEPTH) return [text];
  const nodes = [];
  let plain = "";
  let offset = 0;
  while (offset < text.length) {
    MARK.lastIndex = offset;
    const next = MARK.exec(text)?.index ?? text.length;
    if (next > offset) {
      plain += text.slice(offset, next);
      offset = next;
      continue;
    }
    let found = null;
    for (const [kind, pattern] of INLINE) {
      pattern.lastIndex = offset;
      const match = pattern.exec(text);
      if (!match) continue;
      const insideWord = /\w/.test(text[offset - 1] ?? "");
      const endsInWord = /\w/.test(text[offset + match[0].length] ?? "");
      if (text[offset] === "_" && (insideWord || endsInWord)) continue;
      if (kind === "url" && insideWord) continue;
      found = { kind, match };
      break;
    }
    if (!found) {
      plain += text[offset++];
      continue;
    }
    if (plain) nodes.push(plain);
    plain = "";
    nodes.push(inlineNode(found.kind, found.match, depth));
    offset += found.match[0].length;
  }
  if (plain) nodes.push(plain);
  return nodes;
}

function codeBlock(lines, language) {
  const source = lines.join("\n");
  const copy = element("button", "copy", "Copy");
  copy.type = "button";
  copy.dataset.action = "copy-code";
  copy.setAttribute("aria-label", "Copy code");
  const head = element("div", "code-head", element("span", "", language || "text"), copy);
  const code = element("code", "", ...highlight(source, language));
  const scroller = element("pre", "", code);
  scroller.tabIndex = 0;
  return element("div", "code-block", head, scroller);
}

function splitRow(line) {
  const cells = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "").split(/(?<!\\)\|/);
  return cells.map((cell) => cell.trim().replace(/\\\|/g, "|"));
}

function table(lines) {
  const aligns = splitRow(lines[1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "end") : ""));
  const row = (line, name) =>
    element("tr", "", ...splitRow(line).slice(0, aligns.length).map((cell, column) => element(name, aligns[column], ...inline(cell))));
  const body = lines.slice(2).map((line) => row(line, "td"));
  const made = element("table", "", element("thead", "", row(lines[0], "th")), element("tbody", "", ...body));
  return element("div", "table-scroll", made);
}

function indentOf(line) {
  return /^\s*/.exec(line)[0].replace(/\t/g, "    ").length;
}

function list(lines, depth) {
  const first = ITEM.exec(lines[0]);
  const ordered = /\d/.test(first[2]);
  const made = element(ordered ? "ol" : "ul");
  if (ordered) made.start = parseInt(first[2], 10);
  const base = indentOf(lines[0]);
  const items = [];
  for (const line of lines) {
    const match = ITEM.exec(line);
    if (match && indentOf(line) < base + 2) items.push({ indent: match[1].length + match[2].length + 1, lines: [match[4]] });
    else items.at(-1).lines.push(line);
  }
  const loose = lines.some((line, index) => BLANK.test(line) && index < lines.length - 1);
  for (const item of items) {
    const own = item.lines.map((line, index) => (index ? line.slice(Math.min(indentOf(line), item.indent)) : line));
    const task = /^\[([ xX])\]\s+(.*)$/.exec(own[0]);
    if (task) own[0] = task[2];
    const entry = element("li", task ? "task" : "", ...blocks(own, depth + 1).map((block) => block.make()));
    if (!loose) for (const paragraph of entry.querySelectorAll(":scope > p")) paragraph.replaceWith(...paragraph.childNodes);
    if (task) entry.prepend(element("span", "box", task[1] === " " ? "☐ " : "☑ "));
    made.append(entry);
  }
  return made;
}

function startsBlock(lines, index) {
  const line = lines[index];
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || startsTable(lines, index);
}

function startsTable(lines, index) {
  return lines[index].includes("|") && TABLE_RULE.test(lines[index + 1] ?? "") && lines[index + 1].includes("-")
    && splitRow(lines[index]).length === splitRow(lines[index + 1]).length;
}

function fenceEnd(lines, start, fence) {
  const closing = new RegExp(`^ {0,3}\\${fence[0]}{${fence.length},}\\s*$`);
  let end = start + 1;
  while (end < lines.length && !closing.test(lines[end])) end++;
  return end;
}

/** Returns top-level blocks {from, to, make}; `make` builds the element. An unclosed fence extends to the end. */
function blocks(lines, depth = 0) {
  const found = [];
  const add = (from, to, make) => found.push({ from, to, make: () => make(lines.slice(from, to)) });
  let index = 0;
  while (index < lines.length) {
    const start = index;
    const line = lines[start];
    const fence = FENCE.exec(line);
    const heading = HEADING.exec(line);
    const item = ITEM.exec(line);
    if (BLANK.test(line)) {
      index++;
    } else if (fence) {
      const end = fenceEnd(lines, start, fence[2]);
      const body = lines.slice(start + 1, end).map((text) => text.slice(Math.min(indentOf(text), fence[1].length)));
      index = end + 1;
      add(start, index, () => codeBlock(body, fence[3].trim().split(/\s/)[0]));
    } else if (heading) {
      index++;
      add(start, index, () => element(`h${Math.min(6, heading[1].length + 1)}`, "", ...inline(heading[2])));
    } else if (RULE.test(line)) {
      index++;
      add(start, index, () => element("hr"));
    } else if (QUOTE.test(line) && depth < MAX_DEPTH) {
      while (index < lines.length && QUOTE.test(lines[index])) index++;
      const inner = lines.slice(start, index).map((text) => QUOTE.exec(text)[1]);
      add(start, index, () => element("blockquote", "", ...blocks(inner, depth + 1).map((block) => block.make())));
    } else if (startsTable(lines, start)) {
      index += 2;
      while (index < lines.length && lines[index].includes("|") && !BLANK.test(lines[index])) index++;
      add(start, index, table);
    } else if (item && depth < MAX_DEPTH) {
      index = listEnd(lines, start, /\d/.test(item[2]));
      add(start, index, (own) => list(own, depth));
    } else {
      index++;
      while (index < lines.length && !BLANK.test(lines[index]) && !startsBlock(lines, index) && !startsItem(lines[index])) index++;
      const text = lines.slice(start, index).map((part) => part.replace(/^\s+/, "")).join("\n");
      add(start, index, () => element("p", "", ...inline(text.trimEnd())));
    }
  }
  return found;
}

function startsItem(line) {
  const match = ITEM.exec(line);
  // "1984. A year" inside a paragraph is text; only a list that starts at 1 may interrupt one.
  return Boolean(match && match[4] && (!/\d/.test(match[2]) || parseInt(match[2], 10) === 1));
}

function listEnd(lines, start, ordered) {
  const base = indentOf(lines[start]);
  let index = start + 1;
  let fence = "";
  for (; index < lines.length; index++) {
    const line = lines[index];
    const mark = FENCE.exec(line.trimStart());
    if (mark && indentOf(line) > base) fence = fence ? "" : mark[2];
    if (fence || BLANK.test(line)) continue;
    const item = ITEM.exec(line);
    const sameKind = item && /\d/.test(item[2]) === ordered;
    if (indentOf(line) > base + (item ? 0 : 1)) continue;
    if (item && sameKind && indentOf(line) >= base) continue;
    // A line directly below an item's text continues it.
    if (!item && !BLANK.test(lines[index - 1]) && !startsBlock(lines, index)) continue;
    break;
  }
  while (BLANK.test(lines[index - 1])) index--;
  return index;
}

/** Renders growing text in `host`; only blocks whose source changed are rebuilt. */
export class MarkdownView {
  constructor(host) {
    this.host = host;
    this.shown = [];
  }

  update(text) {
    const lines = text.split("\n");
    const next = blocks(lines).map((block) => ({ source: lines.slice(block.from, block.to).join("\n"), make: block.make }));
    let same = 0;
    while (same < next.length && same < this.shown.length && next[same].source === this.shown[same].source) same++;
    for (const old of this.shown.splice(same)) old.node.remove();
    for (const block of next.slice(same)) {
      const node = block.make();
      this.host.append(node);
      this.shown.push({ source: block.source, node });
    }
  }
}
