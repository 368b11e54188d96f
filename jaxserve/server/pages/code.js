// Blocks of code: the language, a button that copies, and colours once the code is complete.

import { appendAll, element } from "../dashboard/dom.js";

const MAX_COLOURED = 60_000; // characters; longer code has one colour
const HASH = new Set(["python", "py", "bash", "sh", "shell", "zsh", "yaml", "yml", "toml", "ruby", "rb", "r", "perl", "makefile", "dockerfile", "julia", "elixir", "ini"]);
const DASHES = new Set(["sql", "lua", "haskell", "hs", "ada", "elm"]);
const PLAIN = new Set(["text", "txt", "plain", "plaintext", "output", "console", "diff", "markdown", "md"]);
const WORDS = new Set(
  ("and as assert async await auto bool boolean break case catch char class const continue def default defer del delete do double " +
    "elif else end enum except export extends extern false False final finally float fn for foreach from func function global " +
    "go if impl implements import in instanceof int interface is lambda let long loop match mod module mut namespace new nil " +
    "None nonlocal not null of or package pass private protected pub public raise readonly return self select short signed " +
    "sizeof static str string struct super switch then this throw throws trait true True try type typedef typeof undefined " +
    "union unsafe unsigned use using var virtual void volatile where while with yield echo fi done esac local " +
    "SELECT FROM WHERE INSERT INTO VALUES UPDATE SET DELETE CREATE TABLE JOIN LEFT RIGHT INNER ON GROUP ORDER BY LIMIT AS AND OR NOT NULL").split(" "),
);
// Strings end at the end of a line, except those in three quotes and in backticks.
const STRING = /"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?|`(?:[^`\\]|\\[^])*`?/.source;
const REST = /\b(?:0[xX][\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\b|[A-Za-z_$][\w$]*/.source;
const WITH_HASH = new RegExp(`(#[^\\n]*)|(${STRING})|${REST}`, "g");
const WITH_SLASHES = new RegExp(`(//[^\\n]*|/\\*[^]*?(?:\\*/|$))|(${STRING})|${REST}`, "g");
const WITH_DASHES = new RegExp(`(--[^\\n]*)|(${STRING})|${REST}`, "g");

/** Returns the node of a code block, and the node that has its text. `open`: more of it is to come. */
export function codeBlock(language, text, open) {
  const code = element("code", { dir: "ltr" });
  const parts = open || text.length > MAX_COLOURED || PLAIN.has(language.toLowerCase()) ? [] : coloured(language, text);
  appendAll(code, parts.length ? parts : [document.createTextNode(text)]);
  const name = language || "code";
  const head = element("div", { class: "code-head" }, element("span", {}, name), copyButton("Copy code", () => code.textContent));
  const pre = element("pre", { tabindex: "0", role: "group", "aria-label": `Code, ${name}` }, code);
  return { node: element("div", { class: "code" }, head, pre), code };
}

/** Returns code as text and spans for comments, strings, numbers and words of languages. */
export function coloured(language, text) {
  const name = language.toLowerCase();
  const rule = HASH.has(name) ? WITH_HASH : DASHES.has(name) ? WITH_DASHES : WITH_SLASHES;
  const found = [];
  let shown = 0;
  for (const match of text.matchAll(rule)) {
    const [token, comment, string] = match;
    const kind = comment ? "comment" : string ? "string" : /^\d/.test(token) ? "num" : WORDS.has(token) ? "word" : "";
    if (!kind) continue;
    if (match.index > shown) found.push(text.slice(shown, match.index));
    found.push(element("span", { class: `of-${kind}` }, token));
    shown = match.index + token.length;
  }
  if (shown < text.length) found.push(text.slice(shown));
  return found;
}

/** Returns a button that copies what `text()` returns, and says whether it has. */
export function copyButton(label, text) {
  const button = element("button", { type: "button", class: "plain small" }, label);
  button.addEventListener("click", async () => {
    const done = await copied(text());
    button.textContent = done ? "Copied" : "Not allowed here";
    setTimeout(() => (button.textContent = label), 1500);
  });
  return button;
}

/** Copies a text, also at addresses without TLS, where browsers have no clipboard for scripts. */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = element("textarea", { class: "sr-only", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    const focused = document.activeElement;
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    focused?.focus();
    return done;
  }
}
