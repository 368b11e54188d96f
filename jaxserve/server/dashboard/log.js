// The log of decisions, newest first. New entries leave the existing ones as they are, unfolded or not.

import { element, setText } from "./dom.js";
import { clock, signs } from "./format.js";

const SIGNS = { started: "◐", done: "✓", failed: "✕", rejected: "⊘" };
// A change of the set of instances, as in "instance 0 and 1 -> 4 (devices 0, 1)": shown without unfolding.
const REGROUP = /^(add|remove) instance |^instance [^:]+ -> /;
const MAX_UNFOLDED = 400; // characters; longer texts are folded

export class Log {
  constructor({ list, empty, count }) {
    Object.assign(this, { list, empty, count, shown: new Map() });
  }

  /** Shows `decisions` (newest last). `offset` turns times of the engine into seconds since the epoch. */
  show(decisions, offset) {
    const kept = new Map();
    const seen = new Map();
    for (const decision of decisions) {
      const key = `${decision.time} ${decision.policy} ${decision.before_version}`;
      const repeats = seen.get(key) ?? 0;
      seen.set(key, repeats + 1);
      const id = `${key} ${repeats}`;
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
    const regroups = decision.transitions.filter((text) => REGROUP.test(text));
    const changes = regroups.map((text) => element("p", { class: "regroup" }, signs(text)));
    const node = element("li", {}, head, reason, ...changes, detail, this.#transitions(decision, versions));
    return { node, outcome, detail, shownOutcome: null };
  }

  #transitions({ transitions }, versions) {
    if (!transitions.length) return element("p", { class: "versions" }, versions);
    const many = transitions.length === 1 ? "1 transition" : `${transitions.length} transitions`;
    const items = transitions.map((text) => element("li", {}, signs(text)));
    return element("details", {}, element("summary", {}, `${many}, ${versions}`), element("ul", {}, ...items));
  }

  #update(entry, decision) {
    const { node, outcome, detail } = entry;
    if (entry.shownOutcome === decision.outcome) return;
    entry.shownOutcome = decision.outcome;
    const [, kind, rest] = /^(\w+)(?:: ([^]*))?$/.exec(decision.outcome) ?? [null, "done", decision.outcome];
    node.className = `decision ${kind in SIGNS ? kind : ""}`;
    setText(outcome, `${SIGNS[kind] ?? "·"} ${kind === "started" ? "in progress" : kind}`);
    detail.replaceChildren(...(rest ? readable(rest) : []));
  }
}

/** Returns a text as one line for each instance that it mentions, folded if it is long. */
function readable(text) {
  const lines = signs(text).split(/; (?=instance \d+: )/).map((line) => element("span", { class: "say" }, line));
  if (text.length <= MAX_UNFOLDED) return lines;
  return [element("details", { class: "long" }, element("summary", {}, element("span", { class: "folded" }, ...lines)))];
}
