// The requests since the start: how they ended, and why others were refused.

import { element, setText } from "./dom.js";

const RECENT = 60; // seconds that count as recent
const KINDS = [
  ["done", "finished", ({ finished }) => sum({ ...finished, abort: 0, error: 0 })],
  ["cancelled", "cancelled by clients", ({ finished }) => finished.abort ?? 0],
  ["failed", "failed", ({ finished }) => finished.error ?? 0],
  ["refused", "refused", ({ refused }) => sum(refused)],
];
const FAULTS = new Set(["failed", "refused"]);

const sum = (counts) => Object.values(counts).reduce((total, count) => total + count, 0);

/** The numbers of requests. Failures and refusals of the last minute, as far as the page has been open, are coloured. */
export class Requests {
  constructor(list, reasons) {
    this.reasons = reasons;
    this.seen = []; // [time, counts] of the last minute
    this.nodes = KINDS.map(([name, text]) => {
      const number = element("b", { class: "number" });
      const recent = element("span", { class: "badge bad" });
      const node = element("li", { class: name }, number, ` ${text} `, recent);
      list.append(node);
      return { number, recent };
    });
  }

  /** Shows {finished: {reason: count}, refused: {reason: count}} at a time of the engine. */
  show(counts, time, first) {
    if (first) this.seen = [];
    const now = KINDS.map(([, , count]) => count(counts));
    this.seen.push([time, now]);
    while (this.seen.length > 1 && this.seen[1][0] <= time - RECENT) this.seen.shift();
    const before = this.seen[0][1];
    KINDS.forEach(([name], i) => {
      const { number, recent } = this.nodes[i];
      setText(number, String(now[i]));
      const added = now[i] - before[i];
      setText(recent, FAULTS.has(name) && added > 0 ? `${added} in the last minute` : "");
    });
    const why = Object.entries(counts.refused).filter(([, count]) => count).sort((a, b) => b[1] - a[1]);
    setText(this.reasons, why.length ? `Refused: ${why.map(([reason, count]) => `${reason.replaceAll("_", " ")} ${count}`).join(", ")}` : "");
  }
}
