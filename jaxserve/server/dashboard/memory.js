// Memory against the budget: a bar, a legend with numbers, and the ledger's entries.

import { element, setQuantity, setText } from "./dom.js";
import { swatch } from "./chart.js";
import { brief, bytes, joined, percent } from "./format.js";

const PARTS = [
  { name: "Weights", class: "weights", value: (sample) => sample.weight_bytes },
  { name: "KV used", class: "kv-used", value: (sample) => sample.kv_used_bytes },
  { name: "KV free", class: "kv-free", value: (sample) => sample.kv_free_bytes },
];

export class Memory {
  constructor(nodes) {
    Object.assign(this, nodes);
    this.rest = 0;
    this.parts = [{ name: "Other", class: "other", value: () => this.rest }, ...PARTS];
    this.rows = this.parts.map((part) => {
      const bar = element("span", { class: `part ${part.class}` });
      const size = element("b");
      this.bar.append(bar);
      this.legend.append(element("li", {}, swatch(part.class), `${part.name} `, size));
      return { part, bar, size };
    });
  }

  /** What the ledger has beside weights and KV pages: workspace, the runtime. */
  setLedger(status, sample) {
    const entries = Object.entries(status.ledger).sort((a, b) => b[1] - a[1]);
    const used = entries.reduce((sum, [, size]) => sum + size, 0);
    const told = PARTS.reduce((sum, part) => sum + part.value(sample), 0);
    // Samples are of all devices together, the ledger may be of each one.
    this.rest = status.budget === sample.budget ? Math.max(0, used - told) : 0;
    const rows = [...entries, ["used", used], ["left of the budget", status.budget - used]].map(([name, size]) =>
      element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, joined(bytes(size)))),
    );
    this.table.replaceChildren(...rows);
  }

  show(sample) {
    for (const { part, bar, size } of this.rows) {
      bar.style.width = `${(part.value(sample) / sample.budget) * 100}%`;
      setText(size, joined(bytes(part.value(sample))));
    }
    setQuantity(this.number, percent(sample.kv_usage));
    const cache = bytes(sample.kv_used_bytes + sample.kv_free_bytes);
    setText(this.budget, `of ${joined(cache)} KV cache in use`);
    this.bar.setAttribute("aria-label", describe(sample));
  }
}

export function describe(sample) {
  const parts = PARTS.map((part) => `${part.name} ${joined(bytes(part.value(sample)))}`).join(", ");
  return `${parts}, budget ${brief(bytes(sample.budget))}`;
}
