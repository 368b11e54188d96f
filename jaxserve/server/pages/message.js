// Views of messages. A view shows what its message holds whenever `draw` is called.

import { appendAll, element, setText } from "../dashboard/dom.js";
import { joined, seconds } from "../dashboard/format.js";
import { coloured, copyButton } from "./code.js";
import { Markdown } from "./markdown.js";

const REASONS = { length: "cut at the limit of tokens", content_filter: "filtered", abort: "stopped by the server" };

/** Returns the view of a message. `on` has functions for its buttons: edit, again, more and results. */
export function viewOf(message, mode, on) {
  if (message.role === "user") return new UserView(message, mode, on);
  if (message.role === "tool") return new ResultView(message);
  return new AnswerView(message, mode, on);
}

const button = (label, act) => {
  const node = element("button", { type: "button", class: "plain small" }, label);
  node.addEventListener("click", act);
  return node;
};

class UserView {
  constructor(message, mode, on) {
    const text = element("div", { class: "bubble", dir: "auto" }, message.content);
    this.edit = button("Edit", on.edit);
    const actions = element("p", { class: "actions" }, this.edit, copyButton("Copy", () => message.content));
    const label = mode === "text" ? "Your text" : "You wrote";
    this.node = element("article", { class: `message user of-${mode}`, "aria-label": label }, text, actions);
  }

  draw({ last }) {
    this.edit.hidden = !last;
  }
}

class ResultView {
  constructor({ name, content }) {
    const title = element("h3", {}, `Result of ${name || "the call"}`);
    const text = element("pre", { dir: "auto", tabindex: "0" }, content);
    this.node = element("article", { class: "message result", "aria-label": "Result of a tool" }, title, text);
  }

  draw() {}
}

class AnswerView {
  constructor(message, mode, on) {
    this.message = message;
    this.calls = [];
    this.thoughts = element("div", { class: "markdown" });
    this.title = element("summary", {}, "Thinking");
    this.reasoning = element("details", { class: "reasoning" }, this.title, this.thoughts);
    this.title.addEventListener("click", () => (this.folded = true));
    this.body = element("div", mode === "text" ? { class: "plain-text", dir: "auto" } : { class: "markdown" });
    this.called = element("div", { class: "calls" });
    this.waiting = element("p", { class: "waiting-dots", "aria-hidden": "true" }, ...[1, 2, 3].map(() => element("span", {}, "•")));
    this.fault = element("p", { class: "fault", role: "alert" });
    this.stats = element("span", { class: "stats" });
    this.copy = copyButton("Copy", () => message.content);
    this.again = button("Regenerate", on.again);
    this.more = button("Continue", on.more);
    const meta = element("p", { class: "actions" }, this.stats, this.copy, this.more, this.again);
    this.results = new Results(on.results);
    this.node = element("article", { class: "message assistant", "aria-label": "Answer" });
    this.node.append(this.reasoning, this.body, this.waiting, this.called, this.fault, meta, this.results.node);
    this.markdown = mode === "text" ? null : new Markdown(this.body);
    this.thinking = new Markdown(this.thoughts);
    this.mode = mode;
  }

  /** Shows the message. `last`: no message follows. `busy`: some answer is in progress. */
  draw({ last, busy }) {
    const { message } = this;
    const { content, reasoning, calls, state, error, stats } = message;
    const open = state === "waiting" || state === "thinking" || state === "writing";
    this.reasoning.hidden = !reasoning;
    // Open while there is nothing else to read, unless the reader has decided otherwise.
    if (state !== this.state && !this.folded) this.reasoning.open = state === "thinking";
    this.state = state;
    if (reasoning) this.thinking.show(reasoning);
    setText(this.title, titleOf(message));
    if (this.markdown) this.markdown.show(content);
    else grow(this.body, content);
    this.waiting.hidden = state !== "waiting" || error !== undefined;
    this.#showCalls(calls, open);
    this.fault.hidden = !error;
    if (error) setText(this.fault, error);
    setText(this.stats, inNumbers(stats, error ? "" : state));
    this.copy.hidden = open || !content;
    this.again.hidden = !last || busy;
    setText(this.again, error ? "Try again" : "Regenerate");
    this.more.hidden = !(last && !busy && canGoOn(message, this.mode));
    this.results.show(last && !busy && !error ? calls : []);
  }

  #showCalls(calls, open) {
    calls.filter(Boolean).forEach((call, i) => {
      const view = (this.calls[i] ??= new CallView(this.called));
      view.draw(call, open);
    });
    while (this.calls.length > calls.length) this.calls.pop().node.remove();
  }
}

/** Returns whether the model can go on with an answer that has ended early. */
function canGoOn({ content, calls, state, stats, error }, mode) {
  if (mode === "text") return state !== "waiting" && !error;
  return content !== "" && !calls.length && (state === "stopped" || stats.reason === "length" || error !== undefined);
}

class CallView {
  constructor(host) {
    this.name = element("b", { dir: "auto" });
    this.code = element("code", { dir: "ltr" });
    const pre = element("pre", { tabindex: "0", role: "group", "aria-label": "Arguments" }, this.code);
    this.node = element("section", { class: "call" }, element("h3", {}, "Calls ", this.name), pre);
    host.append(this.node);
  }

  draw({ name, arguments: text }, open) {
    setText(this.name, name);
    if (this.shown === text && this.open === open) return;
    Object.assign(this, { shown: text, open });
    this.code.replaceChildren();
    appendAll(this.code, open ? [text] : coloured("json", formatted(text)));
  }
}

/** Returns JSON with line breaks, or the text itself if it is none. */
function formatted(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** A form for the results of calls, which a person gives instead of a program. */
class Results {
  constructor(send) {
    this.fields = element("div");
    const submit = element("button", { type: "submit" }, "Send results");
    this.node = element("form", { class: "results" }, this.fields, submit);
    this.node.addEventListener("submit", (event) => {
      event.preventDefault();
      send([...this.fields.querySelectorAll("textarea")].map((field) => field.value));
    });
  }

  show(calls) {
    this.node.hidden = !calls.length;
    if (this.shown === calls.length) return;
    this.shown = calls.length;
    this.fields.replaceChildren(
      ...calls.map(({ name }) => {
        const field = element("textarea", { rows: "2", dir: "auto", placeholder: "What the tool returns, such as JSON" });
        return element("label", {}, `Result of ${name}`, field);
      }),
    );
  }
}

/** Shows a text that grows, by what is new of it. */
function grow(node, text) {
  const shown = node.firstChild?.data ?? "";
  if (text === shown) return;
  if (shown && text.startsWith(shown)) node.firstChild.appendData(text.slice(shown.length));
  else node.replaceChildren(document.createTextNode(text));
}

function titleOf({ state, stats }) {
  if (state === "thinking") return "Thinking …";
  return stats.thought ? `Thought for ${joined(seconds(stats.thought))}` : "Thinking";
}

/** Returns the numbers of an answer in words: speed, time to the first token, tokens, and why it ended early. */
function inNumbers({ rate, ttft, tokens, reason }, state) {
  const parts = [];
  if (rate) parts.push(`${rate < 9.95 ? rate.toFixed(1) : Math.round(rate)} tokens/s`);
  if (ttft !== undefined) parts.push(`first after ${joined(seconds(ttft))}`);
  if (tokens) parts.push(`${tokens} ${tokens === 1 ? "token" : "tokens"}`);
  if (state === "stopped") parts.push("stopped");
  else if (REASONS[reason]) parts.push(REASONS[reason]);
  return parts.join(" · ");
}
