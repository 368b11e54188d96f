// The parts of a line of Markdown: code, emphasis, links. They are found in one pass over the text.

import { appendAll, element } from "../dashboard/dom.js";

const TOKEN =
  /`+|\*+|_+|~~+|\\[!-/:-@[-`{-~]|!?\[|https?:\/\/[^\s<>"'`|\\]+|<br[ \t]*\/?>|\n/g;
const LINK = /\[([^[\]\n]{1,500})\]\([ \t]*<?([^()\s<>]{1,2000}(?:\([^()\s<>]{0,200}\)[^()\s<>]{0,500})?)>?(?:[ \t]+"[^"\n]{0,300}")?[ \t]*\)/y;
const TAGS = { "*": "em", _: "em", "**": "strong", __: "strong", "~~": "del" };
const MAX_NESTED = 8; // emphasis in emphasis; deeper ones are text
const WORD = /[\p{L}\p{N}]/u;

/** Returns the nodes of a text. */
export function inline(text) {
  const open = [{ mark: "", nodes: [] }]; // the emphasis at this place, the outermost first
  const ticks = runsOfTicks(text);
  let shown = 0;
  const put = (node) => open.at(-1).nodes.push(node);
  TOKEN.lastIndex = 0;
  for (let match = TOKEN.exec(text); match; match = TOKEN.exec(text)) {
    const { index } = match;
    const [node, end] = nodeAt(text, index, match[0], open, ticks);
    if (node === null) continue; // it is text
    if (index > shown) put(text.slice(shown, index));
    if (typeof node === "function") node();
    else put(node);
    shown = TOKEN.lastIndex = end;
  }
  if (shown < text.length) put(text.slice(shown));
  while (open.length > 1) abandon(open);
  return open[0].nodes;
}

/** Returns the node that a token stands for (or a function that opens or closes emphasis; null for text) and where it ends. */
function nodeAt(text, index, token, open, ticks) {
  const after = index + token.length;
  if (token === "\n" || token.startsWith("<br")) return [element("br"), after];
  if (token[0] === "\\") return [token[1], after];
  if (token[0] === "`") return codeAt(text, index, token, ticks);
  if (token.startsWith("http")) {
    const url = token.replace(/[.,;:!?)\]}*_]{1,20}$/, "");
    return [link(url, url), index + url.length];
  }
  if (token.endsWith("[")) {
    LINK.lastIndex = after - 1;
    const match = LINK.exec(text);
    return match ? [link(match[2], match[1]), LINK.lastIndex] : [null, after];
  }
  return emphasis(text, index, token, open);
}

/** Returns the positions of runs of backticks, by their length. */
function runsOfTicks(text) {
  const found = new Map();
  for (const { 0: run, index } of text.matchAll(/`+/g)) {
    if (!found.has(run.length)) found.set(run.length, { at: [], next: 0 });
    found.get(run.length).at.push(index);
  }
  return found;
}

function codeAt(text, index, token, ticks) {
  const runs = ticks.get(token.length);
  while (runs.at[runs.next] <= index) runs.next += 1;
  const end = runs.at[runs.next];
  if (end === undefined) return [null, index + token.length];
  const inside = text.slice(index + token.length, end).replaceAll("\n", " ");
  const padded = inside.length > 2 && inside.startsWith(" ") && inside.endsWith(" ");
  const code = element("code", { dir: "ltr" }, padded ? inside.slice(1, -1) : inside);
  return [code, end + token.length];
}

function emphasis(text, index, token, open) {
  const after = index + token.length;
  if (token.length > (token[0] === "~" ? 2 : 3)) return [null, after];
  const [before, next] = [text[index - 1] ?? " ", text[after] ?? " "];
  if (token[0] === "_" && WORD.test(before) && WORD.test(next)) return [null, after]; // snake_case
  const parts = token.length === 3 ? [token.slice(0, 2), token[0]] : [token];
  const closing = /\s/.test(before) ? [] : parts.toReversed().filter((mark) => open.some((frame) => frame.mark === mark));
  if (closing.length) return [() => closing.forEach((mark) => close(open, mark)), after];
  if (/\s/.test(next) || open.length + parts.length > MAX_NESTED) return [null, after];
  return [() => parts.forEach((mark) => open.push({ mark, nodes: [] })), after];
}

/** Ends the innermost emphasis of a kind. What began inside of it and did not end is text. */
function close(open, mark) {
  if (!open.some((frame) => frame.mark === mark)) return;
  while (open.at(-1).mark !== mark) abandon(open);
  const { nodes } = open.pop();
  open.at(-1).nodes.push(appendAll(element(TAGS[mark]), nodes));
}

/** Makes the mark of an emphasis without an end text. */
function abandon(open) {
  const { mark, nodes } = open.pop();
  const outer = open.at(-1).nodes;
  outer.push(mark);
  for (const node of nodes) outer.push(node);
}

/** Returns a link, or its text if the address is not one of the web or of mail. */
function link(address, text) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return text;
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return text;
  return element("a", { href: url.href, title: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, text);
}
