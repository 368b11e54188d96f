// Markdown of a model as DOM nodes. Whatever a model writes becomes text: no markup of it is ever interpreted.
//
// While an answer grows, only its last block is rendered again, and of an open code block only what is new. Every rule
// takes time that is linear in the text, however odd it is.

import { appendAll, element } from "../dashboard/dom.js";
import { codeBlock } from "./code.js";
import { inline } from "./inline.js";

const MAX_DEPTH = 6; // of lists and quotes in each other; deeper ones are text
const MAX_COLUMNS = 50;
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+/;
const RULE = /^ {0,3}(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const ITEM = /^([ \t]{0,40})([-*+]|\d{1,9}[.)])([ \t]{1,4}|$)/;
const QUOTE = /^ {0,3}> ?/;
const DELIMITERS = /^[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const PARTIAL_FENCE = /^ {0,3}[`~]*$/; // a line that may become the end of a code block

/** A text that grows, in a host element. */
export class Markdown {
  constructor(host) {
    Object.assign(this, { host, text: "", from: 0, kept: 0, open: null });
  }

  /** Shows a text. If it begins with the one shown before, only what has changed is rendered. */
  show(text) {
    if (!text.startsWith(this.text)) {
      this.host.replaceChildren();
      Object.assign(this, { from: 0, open: null, kept: 0 });
    }
    this.text = text;
    if (this.open && this.open.grow(text)) return;
    while (this.host.childNodes.length > this.kept) this.host.lastChild.remove();
    const lines = text.slice(this.from).split("\n");
    const found = blocks(lines, 0);
    appendAll(this.host, found.map((block) => block.node));
    this.#keep(lines, found);
  }

  /** Remembers which blocks are complete: all but the last one. */
  #keep(lines, found) {
    const last = found.at(-1);
    this.open = null;
    if (!last) return;
    const start = this.from + lines.slice(0, last.start).reduce((sum, line) => sum + line.length + 1, 0);
    this.from = start;
    this.kept = this.host.childNodes.length - 1;
    if (last.open) this.open = new OpenCode(this.text, start, last);
  }
}

/** A code block whose end has not come: what is new is appended to its text. */
class OpenCode {
  constructor(text, start, { code, fence }) {
    const head = text.indexOf("\n", start);
    Object.assign(this, { code, fence, shown: text.length, line: head < 0 ? Infinity : head + 1 });
  }

  /** Shows the rest of a text, and returns whether the block is still open. */
  grow(text) {
    if (this.line > text.length) return false; // its first line was not complete
    for (;;) {
      const end = text.indexOf("\n", this.line);
      if (isEnd(text.slice(this.line, end < 0 ? text.length : end), this.fence)) return false;
      if (end < 0) break;
      this.line = end + 1;
    }
    const until = PARTIAL_FENCE.test(text.slice(this.line)) ? this.line : text.length;
    if (until > this.shown) {
      this.code.lastChild.appendData(text.slice(this.shown, until));
      this.shown = until;
    }
    return true;
  }
}

/** Returns whether a line ends the code that a fence begins. */
function isEnd(line, fence) {
  const found = FENCE.exec(line);
  return found !== null && found[1][0] === fence[0] && found[1].length >= fence.length && !found[2].trim();
}

/** Returns the blocks of lines: [{start: index of its first line, node, and of code without an end: open, code, fence}]. */
function blocks(lines, depth) {
  const found = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [block, next] = blockAt(lines, at, depth);
    found.push({ start: at, ...block });
    at = next;
  }
  return found;
}

/** Returns the block that begins at a line, and the index of the line after it. */
function blockAt(lines, at, depth) {
  const line = lines[at];
  let match = FENCE.exec(line);
  if (match) return code(lines, at, match);
  match = HEADING.exec(line);
  if (match) {
    const tag = `h${Math.min(6, match[1].length + 2)}`; // below the headings of the page
    return [{ node: block(tag, line.slice(match[0].length).trim()) }, at + 1];
  }
  if (RULE.test(line)) return [{ node: element("hr") }, at + 1];
  if (isTable(lines, at)) return table(lines, at);
  if (depth < MAX_DEPTH && QUOTE.test(line)) return quote(lines, at, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return list(lines, at, depth);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines, end)) end += 1;
  return [{ node: block("p", lines.slice(at, end).join("\n").trim()) }, end];
}

/** Returns whether a line ends the paragraph before it. */
const interrupts = (lines, at) =>
  [FENCE, HEADING, RULE, QUOTE, ITEM].some((rule) => rule.test(lines[at])) || isTable(lines, at);

const block = (tag, text) => directed(appendAll(element(tag), inline(text)));

/** Lets the text of an element decide its direction. Once it is there: each further node would make it decide again. */
function directed(node) {
  node.dir = "auto";
  return node;
}

function code(lines, at, [, fence, info]) {
  let end = at + 1;
  while (end < lines.length && !isEnd(lines[end], fence)) end += 1;
  const open = end === lines.length;
  const { node, code } = codeBlock(info.trim().split(/\s/)[0], lines.slice(at + 1, end).join("\n"), open);
  return [{ node, open, code, fence }, end + 1];
}

function quote(lines, at, depth) {
  const inside = [];
  let end = at;
  for (; end < lines.length && lines[end].trim(); end += 1) {
    if (!QUOTE.test(lines[end]) && interrupts(lines, end)) break;
    inside.push(lines[end].replace(QUOTE, ""));
  }
  return [{ node: directed(appendAll(element("blockquote"), nodes(inside, depth + 1))) }, end];
}

const nodes = (lines, depth) => blocks(lines, depth).map((block) => block.node);

function list(lines, at, depth) {
  const [, , marker] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(marker);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const match = ITEM.exec(lines[end]);
    if (!match || /\d/.test(match[2]) !== ordered || RULE.test(lines[end])) break;
    const [item, next] = itemAt(lines, end, match);
    items.push(item);
    end = next;
  }
  const children = items.map((item) => directed(appendAll(element("li"), contents(item, depth))));
  const start = ordered ? { start: String(parseInt(marker, 10)) } : {};
  return [{ node: appendAll(element(ordered ? "ol" : "ul", start), children) }, end];
}

/** Returns the lines of a list's item without their indentation, and the index of the line after it. */
function itemAt(lines, at, [all, indent]) {
  const inside = [lines[at].slice(all.length)];
  let end = at + 1;
  let blank = false;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    const deep = width(line) >= width(indent) + 2;
    if (!line.trim()) blank = true;
    else if (deep) blank = false;
    else if (blank || interrupts(lines, end)) break;
    inside.push(deep ? unindented(line, all.length) : line.trim());
  }
  return [inside, end];
}

/** Returns the number of spaces with which a line begins. A tab counts as four. */
const width = (line) => /^[ \t]*/.exec(line)[0].replaceAll("\t", "    ").length;

/** Returns a line without up to `count` spaces at its begin. */
const unindented = (line, count) => {
  const spaces = width(line);
  return " ".repeat(Math.max(0, spaces - count)) + line.trimStart();
};

/** Returns the contents of an item: text alone is not put into a paragraph. */
function contents(lines, depth) {
  const found = nodes(lines, depth + 1);
  return found.flatMap((node, i) => (i === 0 && node.tagName === "P" ? [...node.childNodes] : [node]));
}

function isTable(lines, at) {
  const next = lines[at + 1] ?? "";
  return lines[at].includes("|") && next.includes("|") && next.includes("-") && DELIMITERS.test(next);
}

function table(lines, at) {
  const head = cells(lines[at]);
  const sides = cells(lines[at + 1]).map((text) => (text.endsWith(":") ? (text.startsWith(":") ? "middle" : "end") : ""));
  const cell = (tag, text, i) => directed(appendAll(element(tag, { class: sides[i] ?? "" }), inline(text)));
  const row = (tag, texts) => element("tr", {}, ...head.map((_, i) => cell(tag, texts[i] ?? "", i)));
  const rows = [];
  let end = at + 2;
  for (; end < lines.length && lines[end].includes("|"); end += 1) rows.push(row("td", cells(lines[end])));
  const parts = [element("thead", {}, row("th", head)), appendAll(element("tbody"), rows)];
  return [{ node: element("div", { class: "table", tabindex: "0" }, element("table", {}, ...parts)) }, end];
}

/** Returns the texts of a table's row. A bar after a backslash is part of a text. */
function cells(line) {
  const texts = line.trim().replace(/^\|/, "").replace(/([^\\])\|$/, "$1").split(/(?<!\\)\|/);
  return texts.slice(0, MAX_COLUMNS).map((text) => text.trim().replaceAll("\\|", "|"));
}
