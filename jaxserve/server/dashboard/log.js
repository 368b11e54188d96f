// The decisions as a log, newest first. Entries stay as they are while others come: open ones stay open.

import { element, setText } from "./dom.js";
import { clock, signs } from "./format.js";

const SIGNS = { started: "◐", done: "✓", failed: "✕", rejected: "⊘" };
const LONG = 400; // letters from which on a text is folded

export class Log {
  constructor({ list, empty, count }) {
    Object.assign(this, { list, empty, count, shown: new Map() });
  }

  /** `decisions`: newest last. `offset`: from the engine's clock to seconds since the epoch. */
  show(decisions, offset) {
    const kept = new Map();
    const seen = new Map();
    for (const decision of decisions) {
      const same = `${decision.time} ${decision.policy} ${decision.before_version}`;
      const number = seen.get(same) ?? 0;
      seen.set(same, number + 1);
      const id = `${same} ${number}`;
      const entry = this.shown.get(id) ?? this.#entry(decision, offset);
      this.#update(entry, decision);
      kept.set(id, entry);
    }
    for (const [id, entry] of this.shown) if (!kept.has(id)) entry.node.remove();
    for (const entry of kept.values()) if (!entry.node.isConnected) this.list.prepend(entry.node);
    this.shown = kept;
    this.empty.hidden = kept.size > 0;
    setText(this.count, kept.size ? `the last ${kept.size}` : "");
  }

  clear() {
    this.show([], 0);
  }

  #entry(decision, offset) {
    const outcome = element("span", { class: "outcome" });
    const detail = element("div", { class: "detail" });
    const when = new Date((decision.time + offset) * 1e3);
    const time = element("time", { datetime: when.toISOString() }, clock(decision.time + offset));
    const versions = `plan ${decision.before_version} → ${decision.target_version}`;
    const head = element("p", { class: "head" }, time, outcome, element("span", { class: "by" }, decision.policy));
    const reason = element("div", { class: "reason" }, ...readable(decision.reason || "no reason given"));
    const node = element("li", {}, head, reason, detail, this.#transitions(decision, versions));
    return { node, outcome, detail, told: null };
  }

  #transitions({ transitions }, versions) {
    if (!transitions.length) return element("p", { class: "versions" }, versions);
    const many = transitions.length === 1 ? "1 transition" : `${transitions.length} transitions`;
    const items = transitions.map((text) => element("li", {}, signs(text)));
    return element("details", {}, element("summary", {}, `${many}, ${versions}`), element("ul", {}, ...items));
  }

  #update(entry, decision) {
    const { node, outcome, detail } = entry;
    if (entry.told === decision.outcome) return;
    entry.told = decision.outcome;
    const [, kind, rest] = /^(\w+)(?:: ([^]*))?$/.exec(decision.outcome) ?? [null, "done", decision.outcome];
    node.className = `decision ${kind in SIGNS ? kind : ""}`;
    setText(outcome, `${SIGNS[kind] ?? "·"} ${kind === "started" ? "in progress" : kind}`);
    detail.replaceChildren(...(rest ? readable(rest) : []));
  }
}

/** A line for each instance of which a text speaks; folded where it is long. */
function readable(text) {
  const lines = signs(text).split(/; (?=instance \d+: )/).map((line) => element("span", { class: "say" }, line));
  if (text.length <= LONG) return lines;
  return [element("details", { class: "long" }, element("summary", {}, element("span", { class: "folded" }, ...lines)))];
}
